"""A server that keeps its data: journal, snapshots, recovery, and the directory they are in."""
