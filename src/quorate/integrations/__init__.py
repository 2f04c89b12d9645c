"""Quorate inside other people's launchers and frameworks. Nothing here is imported unless somebody asks for it.

`quorate.integrations.torchrun` needs torch, `quorate.integrations.jax` needs jax; everything else works without.
"""
