"""Rallypoint inside other launchers and frameworks. Nothing here is imported unless it is used.

`rallypoint.integrations.torchrun` needs torch, `rallypoint.integrations.jax` needs jax; everything else needs neither.
"""
