"""The web page: runs live in a browser, and their operating commands.

It reads runs through the backend contract, as every observer does, so it works on any backend and makes no run; it
closes, reopens and drains only for viewers who may. It is always a process of its own: `rallypoint dashboard URL`
(`process.py`), which `rallypoint serve --http` starts as a child (`child.py`, `server_link.py`). `page/` is for the
browser: plain HTML, CSS and JavaScript modules, and nothing from elsewhere.
"""
