"""What schedulers and MPI launchers say about a node in its environment. Pure. `rallypoint.integrations.hosts` asks."""
