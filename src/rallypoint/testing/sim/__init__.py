"""The simulator: random worlds of real drivers with many faults, on virtual time. A seed determines everything.

`plan` the parameters and faults of a seed, `network` the simulated control plane, `world` the processes, `director` the
faults, healing and liveness checks, `run` one world and its verdict, `campaign` many worlds.
"""
