"""Measurements of Rallypoint beside others, for `rallypoint bench`: the same work on both sides, on this machine.

The command plans cases (`plan`) and runs each in a process group of its own (`runner`, `case`), so that nothing
survives it. In that process a crew of nodes is forked (`crew`, `node`, `driver`) and told what to do (`measures`,
`idle`); what a node and a server are is said by one side each (`rallypoint_side`, `torch_side`, `torchft_side`).
`report` does the sums.

Competitors are imported inside functions only: none of them is a dependency.
"""
