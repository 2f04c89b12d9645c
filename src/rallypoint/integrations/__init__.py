"""Rallypoint inside other people's launchers and frameworks. Nothing here is imported unless somebody asks for it.

`rallypoint.integrations.torchrun` needs torch, `rallypoint.integrations.jax` needs jax; everything else works without.
"""
