"""Slurm's lists of nodes, in every form that Slurm writes."""

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.errors import SettingsError
from rallypoint.integrations.schedulers.nodelist import MOST_NODES, expand, first, tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu1,login", ["gpu1", "login"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[001-003,7]", ["gpu001", "gpu002", "gpu003", "gpu7"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("rack[0-1]-ib[7-8]", ["rack0-ib7", "rack0-ib8", "rack1-ib7", "rack1-ib8"]),
        ("gpu[001-002,7]-ib[0-1]", [f"gpu{a}-ib{b}" for a in ("001", "002", "7") for b in "01"]),
        ("a[1-2],b3,c[4,06]d", ["a1", "a2", "b3", "c4d", "c06d"]),
        ("[1-2]x", ["1x", "2x"]),
        ("r[0-1]n[0-1].example.org", ["r0n0.example.org", "r0n1.example.org", "r1n0.example.org", "r1n1.example.org"]),
    ],
)
def test_list_is_written_out_in_order(text, names):
    assert list(expand(text)) == names
    assert first(text) == names[0]


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
def test_what_is_no_list_is_refused_and_quoted(text):
    with pytest.raises(SettingsError) as caught:
        expand(text)
    assert "is not a list of Slurm" in str(caught.value)
    assert repr(text) in str(caught.value)


def test_absurdly_long_list_is_refused_before_it_is_written_out():
    text = "a[0-999999]b[0-999999]c[0-999999]"
    with pytest.raises(SettingsError, match=str(MOST_NODES)):
        expand(text)
    assert first(text) == "a0b0c0"


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


def meant(entry: list) -> list[str]:
    """The names that it stands for, the slow way."""
    choices = [
        [piece]
        if isinstance(piece, str)
        else [str(n).zfill(max(w, len(str(a)))) for a, b, w in piece for n in range(a, b + 1)]
        for piece in entry
    ]
    return ["".join(parts) for parts in product(*choices)]


@given(st.lists(entries, min_size=1, max_size=3))
@example([["gpu", [(1, 4, 3), (7, 7, 1)], "-ib", [(0, 1, 1)]]])
def test_every_list_that_can_be_written_is_read_back(drawn):
    text = ",".join(written(entry) for entry in drawn)
    names = [name for entry in drawn for name in meant(entry)]
    assert list(expand(text)) == names
    assert first(text) == names[0]


@given(st.text("ab1-,[]", max_size=12))
def test_any_text_is_a_list_or_a_settings_error(text):
    try:
        names = expand(text)
    except SettingsError:
        return
    assert names
    assert first(text) == names[0]
    assert not any(set(name) & set("[],") for name in names)


def test_tasks_per_node_are_counted():
    assert tasks_per_node("2(x3),1") == ((2, 3), (1, 1))
    with pytest.raises(SettingsError, match="2x3"):
        tasks_per_node("2x3")
