"""Looking at a run from outside: what it is, what it waits for, what happens to it.

Everything here works through the backend contract, so on any backend that opens from a URL. Looking takes no session,
renews nothing, makes no run and serves nothing. `report.py` is the picture, `scene.py` draws it, `follower.py` keeps it
up to date, `explain.py` puts it into words.
"""
