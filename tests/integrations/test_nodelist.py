"""Slurm's node lists, in every form that Slurm writes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.errors import SettingsError
from rallypoint.integrations.schedulers.nodelist import first, tasks_per_node


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,login", "gpu1"),
        ("gpu[1-3]", "gpu1"),
        ("gpu[001-003,7]", "gpu001"),
        ("gpu[08-11]", "gpu08"),
        ("gpu[8-11]", "gpu8"),
        ("rack[0-1]-ib[7-8]", "rack0-ib7"),
        ("gpu[001-002,7]-ib[0-1]", "gpu001-ib0"),
        ("a[1-2],b3,c[4,06]d", "a1"),
        ("[1-2]x", "1x"),
        ("r[0-1]n[0-1].example.org", "r0n0.example.org"),
        ("a[0-999999]b[0-999999]c[0-999999]", "a0b0c0"),
    ],
)
def test_first_name_of_a_list_is_found(text, name):
    assert first(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "a,,b",
        "a[",
        "a]",
        "a[]",
        "a[1",
        "a[1-]",
        "a[-1]",
        "a[3-1]",
        "a[x]",
        "a[1-2-3]",
        "a[[1]]",
        "a b",
        "a[1:2]",
    ],
)
def test_invalid_list_is_refused_and_quoted(text):
    with pytest.raises(SettingsError) as caught:
        first(text)
    assert "is not a valid Slurm list" in str(caught.value)
    assert repr(text) in str(caught.value)


words = st.text("abcxyz-.", min_size=1, max_size=4)
ranges = st.tuples(st.integers(0, 1200), st.integers(0, 5), st.integers(1, 5)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
)
brackets = st.lists(ranges, min_size=1, max_size=3)
entries = st.lists(st.one_of(words, brackets), min_size=1, max_size=4)


def written(entry: list) -> str:
    """An entry as Slurm writes it."""
    parts = []
    for piece in entry:
        if isinstance(piece, str):
            parts.append(piece)
        else:
            shown = [f"{a:0{w}d}" if a == b else f"{a:0{w}d}-{b:0{w}d}" for a, b, w in piece]
            parts.append(f"[{','.join(shown)}]")
    return "".join(parts)


def first_of(entry: list) -> str:
    """The first name that an entry stands for."""
    return "".join(piece if isinstance(piece, str) else str(piece[0][0]).zfill(piece[0][2]) for piece in entry)


@given(st.lists(entries, min_size=1, max_size=3))
@example([["gpu", [(1, 4, 3), (7, 7, 1)], "-ib", [(0, 1, 1)]]])
def test_first_name_of_every_list_that_slurm_can_write_is_found(drawn):
    assert first(",".join(written(entry) for entry in drawn)) == first_of(drawn[0])


@given(st.text("ab1-,[]", max_size=12))
def test_any_text_has_a_first_name_or_is_a_settings_error(text):
    try:
        name = first(text)
    except SettingsError:
        return
    assert name
    assert not set(name) & set("[],")


def test_tasks_per_node_are_counted():
    assert tasks_per_node("2(x3),1") == ((2, 3), (1, 1))
    with pytest.raises(SettingsError, match="2x3"):
        tasks_per_node("2x3")
