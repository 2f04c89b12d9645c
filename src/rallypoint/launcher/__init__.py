"""The launcher: starts the workers of one node and looks after them, round after round.

`policy` decides (pure); `supervisor` does what it says, with `crew` for the processes and `book` for what the launchers
of a run agree on. Nothing below this layer knows that there are workers.
"""
