"""Backend `tcp`: the client of the embedded server."""
