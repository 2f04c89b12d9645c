"""What is wrong between this machine and a run: checks, each with a verdict, what was found and what to do.

`diagnose` runs them. Those of a place are by URL scheme, and a plug-in adds its own with `register_checks`; those of
the run go through the backend contract and are the same for all. No check compares clocks of two machines.
"""

from rallypoint.observe.doctor.checks import Check, Verdict, register_checks
from rallypoint.observe.doctor.diagnose import diagnose

__all__ = ["Check", "Verdict", "diagnose", "register_checks"]
