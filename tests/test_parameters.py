"""`RendezvousParameters`: stored values, conversions, and errors."""

import pytest

from rallypoint.errors import SettingsError
from rallypoint.parameters import RendezvousParameters


def parameters(**changes):
    given = {"backend": "rallypoint", "endpoint": "head:29400", "run_id": "my-run", "min_nodes": 2, "max_nodes": 4}
    return RendezvousParameters(**(given | changes))


def test_parameters_keep_their_values():
    params = RendezvousParameters("rallypoint", "head:29400", "my-run", 2, 4, "10.0.0.7", timeout=900, is_host="yes")
    assert params.backend == "rallypoint"
    assert params.endpoint == "head:29400"
    assert params.run_id == "my-run"
    assert (params.min_nodes, params.max_nodes) == (2, 4)
    assert params.local_addr == "10.0.0.7"
    assert params.config == {"timeout": 900, "is_host": "yes"}


def test_the_local_address_is_none_unless_given():
    assert parameters().local_addr is None


def test_equal_sizes_are_fine():
    assert parameters(min_nodes=1, max_nodes=1).max_nodes == 1


@pytest.mark.parametrize(
    ("changes", "option", "quoted"),
    [
        ({"backend": ""}, "backend", "backend name is empty"),
        ({"backend": None}, "backend", "backend name is empty"),
        ({"min_nodes": 0}, "min_nodes", "min_nodes=0"),
        ({"min_nodes": -3}, "min_nodes", "min_nodes=-3"),
        ({"min_nodes": "two"}, "min_nodes", "min_nodes='two'"),
        ({"max_nodes": 1.5}, "max_nodes", "max_nodes=1.5"),
        ({"min_nodes": 5}, "max_nodes", "max_nodes=4 is below min_nodes=5"),
    ],
)
def test_invalid_parameters_are_refused_with_name_and_value(changes, option, quoted):
    with pytest.raises(SettingsError) as caught:
        parameters(**changes)
    assert isinstance(caught.value, ValueError)
    assert caught.value.option == option
    assert quoted in str(caught.value)


def test_get_returns_the_value_as_it_was_given_or_the_default():
    params = parameters(color="red", empty=None)
    assert params.get("color") == "red"
    assert params.get("shape") is None
    assert params.get("shape", "round") == "round"
    assert params.get("empty", "default") is None


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "t", "T", "yes", "Yes", "y", " y ", 1, True])
def test_every_spelling_of_true_is_true(value):
    assert parameters(flag=value).get_as_bool("flag") is True


@pytest.mark.parametrize("value", ["0", "false", "False", "f", "F", "no", "NO", "n", 0, False])
def test_every_spelling_of_false_is_false(value):
    assert parameters(flag=value).get_as_bool("flag") is False


@pytest.mark.parametrize("value", ["01", "10", "", "on", "truee", "-1", 2, -1, 1.0, [], object])
def test_invalid_boolean_is_refused_with_name_and_value(value):
    with pytest.raises(SettingsError) as caught:
        parameters(flag=value).get_as_bool("flag")
    assert f"flag={value!r} is not a boolean" in str(caught.value)
    assert (caught.value.option, caught.value.value) == ("flag", value)


@pytest.mark.parametrize(
    ("value", "number"), [("7", 7), (" 7 ", 7), ("\t-7\n", -7), ("+7", 7), ("007", 7), (7, 7), (0, 0), (-1, -1)]
)
def test_integers_are_read_with_blanks_around_them(value, number):
    assert parameters(count=value).get_as_int("count") == number


@pytest.mark.parametrize("value", ["", " ", "a", "0a", "3b", "abc", "1.0", "1_0", "1 0", "٣", 1.5, [], True])
def test_invalid_integer_is_refused_with_name_and_value(value):
    with pytest.raises(SettingsError) as caught:
        parameters(count=value).get_as_int("count")
    assert f"count={value!r} is not an integer" in str(caught.value)


def test_an_integer_with_too_many_digits_is_refused():
    with pytest.raises(SettingsError, match=r"count=.*too large"):
        parameters(count="9" * 5000).get_as_int("count")


@pytest.mark.parametrize("getter", ["get_as_bool", "get_as_int"])
def test_absent_options_have_their_defaults(getter):
    params = parameters(empty=None)
    assert getattr(params, getter)("absent") is None
    assert getattr(params, getter)("absent", 1) == 1
    assert getattr(params, getter)("empty") is None
