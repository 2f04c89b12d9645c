"""A server that keeps its data: the log, snapshots, recovery, and the directory with the files."""
