"""torchrun's `--redirects` and `--tee`."""

import pytest

from rallypoint.errors import SettingsError
from rallypoint.launcher.logs import Choice, Logs, Std


def test_choice_is_for_all_workers_or_by_local_rank():
    assert Choice.parse("tee", "3").of(7) == Std.ALL
    by_rank = Choice.parse("tee", "0:1,2:2")
    assert [by_rank.of(rank) for rank in range(3)] == [Std.OUT, Std.NONE, Std.ERR]
    assert not Choice.parse("tee", "0").is_any
    assert not Choice.parse("tee", "1:0").is_any
    assert by_rank.is_any


@pytest.mark.parametrize("text", ["4", "x", "0:9", "a:1", "-1", "", "0:1,"])
def test_choice_that_makes_no_sense_is_refused_with_what_would(text):
    with pytest.raises(SettingsError, match="give 0 \\(none\\), 1 \\(stdout\\)"):
        Choice.parse("tee", text)


def test_redirected_output_is_not_shown_and_teed_output_is(tmp_path):
    logs = Logs(tmp_path, redirects=Choice.parse("redirects", "3"), tee=Choice.parse("tee", "2"))
    assert logs.path(0, 1) == tmp_path / "0" / "stdout.log"
    assert [logs.open(0, to)[0] for to in (1, 2)] == [False, True]
    assert Logs(None).open(0, 1) == (True, None)
