"""`rallypoint bench`: measures Rallypoint beside competitors that do the same work, on this machine.

The command plans cases (`plan`), finds the competitors that are installed (`competitors`) and runs each case in a
process group of its own (`runner`, `case`), so that no process survives it. The case's process forks the nodes
(`node_pool`; `node`, `shared_nodes`) and sends them commands (`measures`, `idle`, `scale`, `trips`, `store_speed`).
Each side says how its server and its nodes work (`rallypoint_side`, `torch_side`, `torchft_side`, `jax_side`,
`etcd_side`). `report` computes medians and ratios.

Competitors are no dependencies: they are imported inside functions only.
"""
