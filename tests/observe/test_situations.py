"""What `why`, `status` and `ls` say in staged situations, word for word, in `situations.txt`."""

from pathlib import Path

import pytest

from rallypoint.observe.phase import Phase
from tests.observe.situations import SCENES, Shown, stage

FILE = Path(__file__).with_name("situations.txt")


def section(name: str, shown: Shown) -> str:
    state = shown.state.partition(", since")[0]  # the rest depends on the time of day
    lines = [name.replace("_", " "), state, f"nodes: {shown.counts}", f"ls: {shown.row}", f"why: {shown.why.paragraph}"]
    return "\n".join(lines)


def expected() -> dict[str, str]:
    sections = FILE.read_text(encoding="utf-8").strip().split("\n\n") if FILE.exists() else []
    return {one.partition("\n")[0].replace(" ", "_"): one for one in sections}


@pytest.mark.parametrize("name", SCENES)
def test_situation_is_said_in_these_words(name, request):
    shown = stage(name)
    found = section(name, shown)
    if request.config.getoption("--rewrite"):
        known = {**expected(), name: found}
        FILE.write_text("\n\n".join(known[one] for one in SCENES if one in known) + "\n", encoding="utf-8")
    assert found == expected().get(name), "if this is right: pytest tests/observe/test_situations.py --rewrite"
    phase = shown.report.phase
    assert shown.state.startswith(f"state: {phase.value}")
    assert shown.page == phase.value
    assert shown.listed.phase is phase
    assert shown.listed.tone is phase.tone
    assert phase.value in shown.row


def test_every_phase_of_a_readable_run_is_staged():
    staged = {line.removeprefix("state: ").partition(",")[0] for line in FILE.read_text().splitlines()[1::6]}
    assert staged == {phase.value for phase in Phase} - {Phase.ABSENT.value, Phase.UNREADABLE.value}
