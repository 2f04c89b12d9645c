"""The definitions behind the reference pages are complete, and a change of them would be noticed."""

import inspect

from rallypoint import errors, events
from rallypoint.events import Event
from rallypoint.observe.event_json import FIELDS
from rallypoint.observe.metrics.table import TABLE
from tests.tidy.reference import advice_of, elsewhere, errors_page, event_sections, events_page, fields_of, metrics_page


def classes_of(module, base):
    return {name: one for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, base)}


def test_every_error_is_in_the_tree_under_its_base_with_what_to_do():
    tree = advice_of(errors.__doc__)
    kinds = classes_of(errors, errors.RallypointError)
    assert tree.keys() == kinds.keys()
    above = []
    for name, (depth, advice) in tree.items():
        above = [*above[:depth], name]
        assert depth == 0 or above[-2] in [base.__name__ for base in kinds[name].__bases__], name
        assert advice or name == "RallypointError", name


def test_every_event_is_in_a_section_and_each_of_its_fields_has_a_meaning():
    sections = event_sections(inspect.getsource(events))
    kinds = {name: kind for name, kind in classes_of(events, Event).items() if kind is not Event}
    assert sorted(name for names in sections.values() for name in names) == sorted(kinds)
    assert "" not in sections
    used = {field for kind in kinds.values() for field in fields_of(kind)} | {"run_id", "by"}
    assert used == FIELDS.keys()


def test_every_definition_has_its_row():
    page = metrics_page(TABLE)
    assert all(f"| `{metric.name}` |" in page for metric in TABLE)
    page = events_page()
    assert (
        "| `NodeLost` | warning | `node`, `round`, `reason` | A node's session ended although the node had not left. |"
        in page
    )
    page = errors_page()
    assert "| · · `RendezvousClosedError` | `RendezvousError` |" in page
    assert "| `BindError` | `rallypoint.server.process` |" in page


def test_changed_metric_would_be_noticed():
    assert metrics_page(TABLE[:-1]) != metrics_page(TABLE)


def test_error_class_outside_of_errors_py_is_found():
    source = '''class Odd(RallypointError):\n    """It is odd.\n\n    More.\n    """\n\nclass Other(Exception): ...\n'''
    assert elsewhere({"rallypoint.x": source}, {"RallypointError"}) == [("rallypoint.x", "Odd", "It is odd.")]
