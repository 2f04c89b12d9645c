"""Finds out what is wrong between this machine and a run: checks, each with a verdict, a finding and what to do.

`diagnose` runs all checks. Checks of a backend depend on the URL's scheme, and a plug-in adds its own with
`register_checks`. Checks of the run go through the backend contract and are the same for all schemes. No check compares
the clocks of two machines.
"""

from rallypoint.observe.doctor.checks import Check, Verdict, register_checks
from rallypoint.observe.doctor.diagnose import diagnose

__all__ = ["Check", "Verdict", "diagnose", "register_checks"]
