"""The server as a process: what it is to the scheduler."""

import os
import subprocess
import sys

import pytest

from rallypoint.errors import RallypointError
from rallypoint.server import process
from rallypoint.server.process import NICE, go_first
from tests.patience import PATIENCE_S

MAY = """
import os
try:
    os.setpriority(os.PRIO_PROCESS, 0, -1)
except PermissionError:
    raise SystemExit(1)
"""


class Scheduler:
    """In the place of the system's."""

    def __init__(self, nice=0, may=True):
        self.nice, self.may = nice, may

    def get(self, which, who):
        assert (which, who) == (os.PRIO_PROCESS, 0)
        return self.nice

    def set(self, which, who, nice):
        assert (which, who) == (os.PRIO_PROCESS, 0)
        if not self.may:
            raise PermissionError("Permission denied")
        self.nice = nice


@pytest.fixture
def scheduler(monkeypatch):
    def make(**options):
        one = Scheduler(**options)
        monkeypatch.setattr(process.os, "getpriority", one.get)
        monkeypatch.setattr(process.os, "setpriority", one.set)
        return one

    return make


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [(0, None, NICE), (5, None, 5), (-3, None, -3), (0, 0, 0), (5, 0, 0), (0, 7, 7), (0, -20, -20)],
)
def test_it_goes_before_others_unless_somebody_has_chosen(scheduler, before, asked, after):
    one = scheduler(nice=before)
    go_first(asked)
    assert one.nice == after


def test_where_it_may_not_it_serves_all_the_same_unless_that_was_asked_for(scheduler):
    one = scheduler(may=False)
    go_first()
    assert one.nice == 0
    with pytest.raises(RallypointError, match="niceness -5: run it as root or with CAP_SYS_NICE, or leave --nice out"):
        go_first(-5)


def test_command_does_it():
    if subprocess.run([sys.executable, "-c", MAY], timeout=PATIENCE_S).returncode:
        pytest.skip("this user may not be before others")
    for options, nice in (((), NICE), (("--nice", "0"), 0), (("--nice", "3"), 3)):
        command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
            try:
                assert "listening" in serving.stderr.readline()
                assert os.getpriority(os.PRIO_PROCESS, serving.pid) == nice
            finally:
                serving.terminate()
