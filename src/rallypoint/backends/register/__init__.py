"""Backend `register`: the whole contract on one compare-and-set cell.

`cell` is the interface of a cell and calls blocking ones in a thread; `file_cell` and `store_cell` are the shipped
cells; `shared_cell` is one process's client of a cell, shared by its connections (`backend`, opened by `connect`);
`watch`, `lease_expiry` and `cell_latency` are its parts.
"""
