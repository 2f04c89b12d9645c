"""torchrun's `--redirects` and `--tee`."""

from pathlib import Path

import pytest

from rallypoint.errors import SettingsError
from rallypoint.launcher.logs import PrivateDirectory, Std, StreamChoice, WorkerLogs


def test_choice_is_for_all_workers_or_by_local_rank():
    assert StreamChoice.parse("tee", "3").of(7) == Std.ALL
    by_rank = StreamChoice.parse("tee", "0:1,2:2")
    assert [by_rank.of(rank) for rank in range(3)] == [Std.OUT, Std.NONE, Std.ERR]
    assert not StreamChoice.parse("tee", "0").is_any
    assert not StreamChoice.parse("tee", "1:0").is_any
    assert by_rank.is_any


@pytest.mark.parametrize("text", ["4", "x", "0:9", "a:1", "-1", "", "0:1,"])
def test_invalid_choice_is_refused_with_the_valid_ones(text):
    with pytest.raises(SettingsError, match="give 0 \\(none\\), 1 \\(stdout\\)"):
        StreamChoice.parse("tee", text)


def test_redirected_output_is_not_shown_and_teed_output_is(tmp_path):
    logs = WorkerLogs(tmp_path, redirects=StreamChoice.parse("redirects", "3"), tee=StreamChoice.parse("tee", "2"))
    assert logs.path(0, 1) == tmp_path / "0" / "stdout.log"
    assert [logs.open(0, stream)[0] for stream in (1, 2)] == [False, True]
    assert WorkerLogs(None).open(0, 1) == (True, None)


def test_error_file_is_in_the_log_directory_or_in_a_private_one_that_is_removed(tmp_path):
    assert WorkerLogs(tmp_path).error_file(1) == str(tmp_path / "1" / "error.json")
    private = PrivateDirectory()
    file = Path(WorkerLogs(None, private=private).error_file(1))
    file.write_text("{}")
    assert file == private.path / "1" / "error.json"
    assert private.path.stat().st_mode & 0o077 == 0, "nobody else can read it"
    private.remove()
    assert not file.exists()
    assert not file.parent.exists()
