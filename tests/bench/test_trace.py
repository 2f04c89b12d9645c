"""What `bench/_trace.py` makes of the kernel's events."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "bench" / "_trace.py"
_spec = importlib.util.spec_from_file_location("trace_of_a_round", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
trace = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(trace)

EVENTS = """\
# tracer: nop
          python-10      [000] .....   100.000010: sys_exit: NR 44 = 46
          python-10      [000] d..2.   100.000100: sched_switch: prev_comm=python prev_pid=10 prev_prio=120 prev_state=S ==> next_comm=rallypoint next_pid=20 next_prio=110
          <idle>-0       [001] d..2.   100.000150: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=python next_pid=11 next_prio=120
         rallypoint-20      [000] d..2.   100.000300: sched_switch: prev_comm=rallypoint prev_pid=20 prev_prio=110 prev_state=S ==> next_comm=swapper/0 next_pid=0 next_prio=120
       kworker/1-30      [001] .....   100.000310: sys_exit: NR 232 = 1
       kworker/1-30      [001] d..2.   100.000350: sched_switch: prev_comm=kworker/1 prev_pid=30 prev_prio=120 prev_state=I ==> next_comm=python next_pid=10 next_prio=120
"""  # noqa: E501
OWNERS = {10: trace.NODES, 11: trace.NODES, 20: trace.SERVER}


def found():
    return trace.spans(EVENTS.splitlines(), OWNERS, begin=100.00005, end=100.0004)


def test_what_ran_before_and_after_is_left_out_and_the_rest_is_whole():
    of_first = sorted((span for span in found() if span.core == 0), key=lambda span: span.begin)
    assert [(span.what, round(1e6 * (span.end - span.begin))) for span in of_first] == [
        (trace.NODES, 50),
        (trace.SERVER, 200),
        (trace.IDLE, 100),
    ]
    assert max(span.end for span in found()) == pytest.approx(100.0004)


def test_a_switch_that_was_not_told_counts_as_idle_and_an_unknown_thread_as_others():
    used = trace.totals(found())
    assert used[trace.SERVER] == pytest.approx(200e-6)
    assert used[trace.NODES] == pytest.approx(100e-6), "of thread 11 nothing is known"
    assert used[trace.OTHERS] == pytest.approx(40e-6)
    assert used[trace.IDLE] == pytest.approx(360e-6), "with a core that was not heard of before"


def test_neighbours_of_one_kind_are_one_and_short_ones_are_not_listed():
    spans = [
        trace.Span(0, trace.NODES, 1.0, 1.0001),
        trace.Span(0, trace.NODES, 1.0001, 1.0002),
        trace.Span(0, trace.SERVER, 1.0002, 1.00021),
        trace.Span(0, trace.IDLE, 1.00021, 1.0003),
        trace.Span(1, trace.SERVER, 1.0, 1.0003),
    ]
    assert trace.by_time(spans, 0, 1.0) == "nodes 0-200  idle 210-300"
    assert trace.by_time(spans, 1, 1.0) == "server 0-300"


def test_where_the_kernel_cannot_be_asked_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace, "TRACING", tmp_path)
    with pytest.raises(SystemExit):
        trace.main(["rallypoint", "8"])
    assert "mount -t tracefs" in capsys.readouterr().err
