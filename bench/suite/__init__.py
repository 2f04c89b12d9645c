"""`make bench`: measures Rallypoint beside its competitors; makes docs/benchmarks.md and docs/scale.md of the results.

It is no part of the package; what it runs is `rallypoint.bench`. `cells` says what is measured (pure), `run` measures
it, `results` keeps it as JSON lines, and `page`, `scale_page` and `plot` make the pages and drawings from that file and
from nothing else (pure).
"""
