"""Backend `register`: the whole contract on one compare-and-set cell.

`cell` is what a cell must do and how a blocking one is called, `file` and `stores` are cells that are there, `hub` is
one process's view of a cell, shared by its connections (`backend`); `watch` and `progress` are parts of it.
"""
