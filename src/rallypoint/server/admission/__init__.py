"""Admission to a server: authentication of peers, limits and quotas on what one client may use, and refusals."""
