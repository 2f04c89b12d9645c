"""The web page: what the commands of `rallypoint` show, for people who would rather look than ask.

It reads runs through the backend contract as every observer does, so it works on any backend and can do no harm; it
acts (close, reopen, drain) only for those who may. One follower a run serves all who look at it, is started when
somebody does and stopped afterwards. `picture.py` and `tracks.py` are what is shown, `watching.py` keeps it up to date,
`access.py` and `guard.py` are who may see it, `app.py` the routes, `serving.py` the port. `page/` is what the browser
gets: plain HTML, CSS and JavaScript modules, nothing from elsewhere.
"""
