"""The simulator: large, cruel, random worlds of real drivers on virtual time. A seed draws everything.

`plan` what a seed draws, `network` the simulated control plane, `world` the processes, `director` faults, healing and
liveness, `run` a world to its verdict.
"""
