"""Observing a run from outside: its state, what it waits for, and its events.

Everything here works through the backend contract, and so on every backend that can be opened from a URL. An observer
opens no session, renews nothing, creates no run and hosts no server. `report.py` defines the state of a run as one
value, `report_builder.py` builds it from the keys, `follower.py` keeps it up to date, `explain.py` words it.
"""
