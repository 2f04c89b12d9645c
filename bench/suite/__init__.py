"""`make bench`: everything that is measured beside others, in one run, and the pages that are made from its results.

`cells` says what is to be measured (pure), `rivals` who is there to be measured, `run` does it, `results` keeps it as
JSON lines, and `page`, `scale_page` and `plot` make docs/benchmarks.md, docs/scale.md and their drawings from that file
and nothing else (pure).
"""
