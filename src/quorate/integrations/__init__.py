"""Quorate inside other people's launchers and frameworks. Nothing here is imported unless somebody asks for it.

`quorate.integrations.torchrun` needs torch; everything else works without.
"""
