"""The launcher: starts and supervises the workers of one node, round after round.

`policy` decides (pure) and `supervisor` carries the decisions out, with `worker_group` for the processes and
`restart_budget` for the state that the launchers of a run share. No layer below this one knows about workers.
"""
