"""Text from other processes, made safe for terminals."""

import msgspec
import pytest

from rallypoint._plain import one_line, plainly


class Inner(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]


class Outer(msgspec.Struct, frozen=True):
    inner: tuple[Inner, ...]
    number: float | None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain name", "a plain name"),
        ("naïve 名前", "naïve 名前"),
        ("two\nlines\tand\rmore", "two lines and more"),
        ("\x1b[2Jgone\x07", "�[2Jgone�"),
        ("right\u202eto left", "right�to left"),
    ],
)
def test_text_is_one_line_without_control_characters(text, shown):
    assert one_line(text) == shown


def test_every_text_of_a_value_is_plain():
    rude = Outer((Inner("a\x1b", {"k\b": "v\n"}), Inner("b", {})), 0.5)
    assert plainly(rude) == Outer((Inner("a�", {"k�": "v "}), Inner("b", {})), 0.5)
