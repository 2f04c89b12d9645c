"""Observing a run from outside: its state, what it waits for, and its events.

Reports, events and operator actions work through the backend contract, and so on every backend. They open no session,
renew nothing, create no run and host no server. `sinks` and `metrics` also serve nodes and servers; `doctor` also looks
at the network. `report.py` defines the state of a run as one
value, `report_builder.py` builds it from the keys, `follower.py` keeps it up to date, `explain.py` words it.
"""
