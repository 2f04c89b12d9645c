"""Keys, revisions, transactions and counters of the engine, by example."""

import math

import pytest

from rallypoint.kv.types import (
    Add,
    AddResult,
    Change,
    CreateRevisionIs,
    Delete,
    Deleted,
    DeleteRange,
    Exists,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Item,
    ModRevisionIs,
    Put,
    PutDone,
    Range,
    RangeEmpty,
    Tick,
    Txn,
    TxnResult,
    ValueIs,
    VersionIs,
)
from tests.kv.stores import Store, refusal

LAST = chr(0x10FFFF)
MOST = 2**63 - 1
LEAST = -(2**63)


# Keys and revisions


def test_a_new_store_is_at_revision_one_as_in_etcd() -> None:
    assert Store().revision == 1


def test_a_created_key_has_version_one_and_the_revision_of_its_transaction() -> None:
    store = Store()
    assert store.put("a", b"x") == 2
    assert store.get("a") == Item("a", b"x", create_revision=2, mod_revision=2, version=1)


def test_a_rewritten_key_keeps_its_create_revision() -> None:
    store = Store()
    store.put("a", b"x")
    store.put("b")
    store.put("a", b"y")
    assert store.get("a") == Item("a", b"y", create_revision=2, mod_revision=4, version=2)


def test_a_key_written_after_its_deletion_is_a_new_key() -> None:
    store = Store()
    store.put("a", b"x")
    store.txn(Delete("a"))
    store.put("a", b"y")
    assert store.get("a") == Item("a", b"y", create_revision=4, mod_revision=4, version=1)


def test_writing_the_same_value_again_is_a_change() -> None:
    store = Store()
    store.put("a", b"x")
    assert store.put("a", b"x") == 3
    assert store.item("a").version == 2


def test_all_changes_of_a_transaction_have_one_revision() -> None:
    store = Store()
    store.put("gone")
    result = store.txn(Put("a", b""), Delete("gone"), Put("b", b""))
    assert result == TxnResult(True, 3, (PutDone(), Deleted(1), PutDone()))
    assert store.item("a").mod_revision == store.item("b").mod_revision == 3


@pytest.mark.parametrize("step", [Get("a"), Range(""), Delete("absent"), DeleteRange("absent")])
def test_a_transaction_that_changes_nothing_takes_no_revision(step) -> None:
    store = Store()
    store.put("a")
    assert store.txn(step).revision == 2
    assert store.revision == 2


def test_an_empty_transaction_commits_and_changes_nothing() -> None:
    assert Store().apply(Txn((), ())) == TxnResult(True, 1, ())


def test_an_absent_key_reads_as_none() -> None:
    assert Store().get("a") is None


def test_reads_see_what_was_written_before_them_in_the_same_transaction() -> None:
    store = Store()
    store.put("a", b"old")
    result = store.txn(Get("a"), Put("a", b"new"), Get("a"), Delete("b"), Range(""))
    new = Item("a", b"new", 2, 3, 2)
    assert result.results == (
        GotItem(Item("a", b"old", 2, 2, 1)),
        PutDone(),
        GotItem(new),
        Deleted(0),
        GotRange((new,), 1),
    )


# Ranges


def test_a_range_gives_the_keys_under_a_prefix_in_order() -> None:
    store = Store()
    for key in ["b", "a/2", "a/10", "a", "a/1", "a0", "B"]:
        store.put(key)
    assert store.keys("a/") == ["a/1", "a/10", "a/2"]
    assert store.keys("a") == ["a", "a/1", "a/10", "a/2", "a0"]


def test_the_empty_prefix_covers_every_key() -> None:
    store = Store()
    for key in ["b", LAST, "\0", "a", LAST + LAST + "x"]:
        store.put(key)
    assert store.keys("") == ["\0", "a", "b", LAST, LAST + LAST + "x"]


@pytest.mark.parametrize("prefix", [LAST, LAST + LAST, "a" + LAST, "a" + LAST + LAST, "\ud7ff", "é", "\0", "𝔘"])
def test_a_prefix_of_any_characters_covers_exactly_the_keys_that_start_with_it(prefix: str) -> None:
    store = Store()
    tails = ["", "\0", "a", "\ud7ff", "\ue000", "𝔘", LAST, LAST + LAST]
    heads = ["", "\0", "`", "a", "b", "a" + LAST, "b" + LAST, "\ud7ff", "\ue000", "è", "é", "ê", "𝔘", LAST, LAST + LAST]
    keys = sorted({head + tail for head in heads for tail in tails} - {""})
    store.txn(*[Put(key, b"") for key in keys])
    covered = [key for key in keys if key.startswith(prefix)]
    assert covered
    assert store.keys(prefix) == covered
    assert store.do(Range(prefix, count_only=True)) == GotRange((), len(covered))
    assert store.do(DeleteRange(prefix)) == Deleted(len(covered))
    assert store.keys("") == [key for key in keys if not key.startswith(prefix)]
    assert store.apply(Txn((RangeEmpty(prefix),), ())) == TxnResult(True, 3, ())


def test_a_limited_range_gives_the_first_keys_and_counts_all() -> None:
    store = Store()
    store.txn(*[Put(f"a{digit}", b"") for digit in range(5)], Put("b", b""))
    got = store.do(Range("a", limit=2))
    assert isinstance(got, GotRange)
    assert [item.key for item in got.items] == ["a0", "a1"]
    assert got.count == 5


@pytest.mark.parametrize("limit", [5, 6, 2**63, 2**64 - 1])
def test_a_limit_that_is_not_reached_changes_nothing(limit: int) -> None:
    store = Store()
    store.txn(*[Put(f"a{digit}", b"") for digit in range(5)])
    assert store.do(Range("a", limit=limit)) == store.do(Range("a"))


def test_a_count_reads_no_items_whatever_the_limit() -> None:
    store = Store()
    store.txn(Put("a1", b""), Put("a2", b""), Put("b", b""))
    assert store.do(Range("a", count_only=True)) == GotRange((), 2)
    assert store.do(Range("a", limit=1, count_only=True)) == GotRange((), 2)
    assert store.do(Range("x", count_only=True)) == GotRange((), 0)


def test_a_negative_limit_is_refused_and_nothing_is_written() -> None:
    store = Store()
    assert refusal(store.apply(Txn((), (Put("a", b""), Range("", limit=-1))))) is FailureCode.INVALID
    assert store.keys() == []
    assert store.revision == 1


def test_deleting_a_range_leaves_its_neighbours() -> None:
    store = Store()
    store.txn(*[Put(key, b"") for key in ["a", "a/", "a/x", "a0", "b"]])
    assert store.do(DeleteRange("a/")) == Deleted(2)
    assert store.keys() == ["a", "a0", "b"]
    assert store.do(DeleteRange("")) == Deleted(3)
    assert store.keys() == []


def test_an_empty_key_cannot_be_written_as_in_etcd() -> None:
    store = Store()
    assert refusal(store.apply(Txn((), (Put("", b""),)))) is FailureCode.INVALID
    assert refusal(store.apply(Add("", 1))) is FailureCode.INVALID
    assert store.get("") is None
    assert store.do(Delete("")) == Deleted(0)
    assert store.revision == 1


# Compares


def holds(store: Store, *compares) -> bool:
    result = store.apply(Txn(compares, ()))
    assert isinstance(result, TxnResult)
    return result.committed


@pytest.fixture
def written() -> Store:
    """`a` was created at revision 2 and written again at 3; `gone` was deleted."""
    store = Store()
    store.put("a", b"old")
    store.put("a", b"x")
    store.put("gone")
    store.txn(Delete("gone"))
    return store


@pytest.mark.parametrize(
    "compare",
    [
        Exists("a"),
        Exists("b", wanted=False),
        Exists("gone", wanted=False),
        ValueIs("a", b"x"),
        VersionIs("a", 2),
        VersionIs("b", 0),
        VersionIs("gone", 0),
        CreateRevisionIs("a", 2),
        CreateRevisionIs("gone", 0),
        ModRevisionIs("a", 3),
        ModRevisionIs("gone", 0),
        RangeEmpty("b"),
        RangeEmpty("gone"),
        RangeEmpty("a/"),
    ],
)
def test_a_compare_that_is_true_holds(written: Store, compare) -> None:
    assert holds(written, compare)


@pytest.mark.parametrize(
    "compare",
    [
        Exists("a", wanted=False),
        Exists("b"),
        Exists("gone"),
        ValueIs("a", b"old"),
        ValueIs("b", b""),
        VersionIs("a", 1),
        VersionIs("a", 0),
        VersionIs("gone", 1),
        CreateRevisionIs("a", 3),
        CreateRevisionIs("a", 0),
        ModRevisionIs("a", 2),
        ModRevisionIs("a", 0),
        ModRevisionIs("gone", 5),
        RangeEmpty("a"),
        RangeEmpty(""),
    ],
)
def test_a_compare_that_is_false_does_not_hold(written: Store, compare) -> None:
    assert not holds(written, compare)


def test_all_compares_have_to_hold() -> None:
    store = Store()
    store.put("a")
    assert holds(store, Exists("a"), VersionIs("b", 0))
    assert not holds(store, Exists("a"), Exists("b"))
    assert not holds(store, Exists("b"), Exists("a"))


def test_a_refused_transaction_takes_its_other_branch() -> None:
    store = Store()
    result = store.apply(Txn((Exists("a"),), (Put("yes", b""),), (Put("no", b""), Get("no"))))
    assert result == TxnResult(False, 2, (PutDone(), GotItem(Item("no", b"", 2, 2, 1))))
    assert store.keys() == ["no"]


def test_a_refused_transaction_without_another_branch_reads_what_it_compared() -> None:
    store = Store()
    store.txn(Put("a", b"x"), Put("p/1", b""), Put("p/2", b""))
    result = store.apply(Txn((Exists("a"), Exists("b"), RangeEmpty("p/"), RangeEmpty("q/")), (Put("c", b""),)))
    assert result == TxnResult(
        False,
        2,
        (
            GotItem(Item("a", b"x", 2, 2, 1)),
            GotItem(None),
            GotRange((Item("p/1", b"", 2, 2, 1),), 2),
            GotRange((), 0),
        ),
    )
    assert store.revision == 2


def test_compares_use_the_state_before_the_transaction() -> None:
    store = Store()
    assert store.apply(Txn((Exists("a", wanted=False),), (Put("a", b""),))) == TxnResult(True, 2, (PutDone(),))
    assert store.apply(Txn((Exists("a", wanted=False),), (Put("a", b""),), (Get("b"),))) == TxnResult(
        False, 2, (GotItem(None),)
    )


# Refused transactions


@pytest.mark.parametrize(
    "steps",
    [
        (Put("a", b"1"), Put("a", b"2")),
        (Put("a", b"1"), Delete("a")),
        (Delete("a"), Put("a", b"1")),
        (DeleteRange("a"), Put("ab", b"1")),
        (Put("ab", b"1"), DeleteRange("a")),
        (Put("ab", b"1"), DeleteRange("")),
    ],
)
def test_a_transaction_that_writes_a_key_twice_is_refused_and_changes_nothing(steps) -> None:
    store = Store()
    store.put("a", b"old")
    assert refusal(store.apply(Txn((), (Put("other", b""), *steps)))) is FailureCode.INVALID
    assert store.revision == 2
    assert store.keys() == ["a"]


def test_ranges_that_overlap_can_be_deleted_in_one_transaction() -> None:
    store = Store()
    store.txn(Put("a", b""), Put("ab", b""))
    assert store.txn(DeleteRange("ab"), DeleteRange("a")).results == (Deleted(1), Deleted(1))


def test_only_the_branch_that_is_taken_can_be_refused() -> None:
    store = Store()
    twice = (Put("a", b"1"), Put("a", b"2"))
    assert store.apply(Txn((Exists("x"),), twice, (Get("x"),))) == TxnResult(False, 1, (GotItem(None),))
    assert refusal(store.apply(Txn((Exists("x"),), (), twice))) is FailureCode.INVALID


# Add


def test_adding_begins_at_zero_and_stores_a_decimal_number() -> None:
    store = Store()
    assert store.apply(Add("n", 5)) == AddResult(True, 2, 5)
    assert store.apply(Add("n", -12)) == AddResult(True, 3, -7)
    assert store.get("n") == Item("n", b"-7", 2, 3, 2)


def test_adding_zero_creates_the_key() -> None:
    store = Store()
    assert store.apply(Add("n", 0)) == AddResult(True, 2, 0)
    assert store.item("n").value == b"0"


@pytest.mark.parametrize(
    ("text", "number"),
    [(b"0", 0), (b"-0", 0), (b"007", 7), (b"-5", -5), (b"%d" % MOST, MOST), (b"%d" % LEAST, LEAST)],
)
def test_a_decimal_number_that_was_put_can_be_added_to(text: bytes, number: int) -> None:
    store = Store()
    store.put("n", text)
    assert store.apply(Add("n", 0)) == AddResult(True, 3, number)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"-", b"+5", b" 5 ", b"5\n", b"1_0", b"--5", b"1.0", b"1e3", b"0x1", b"five", b"\xff", "٣".encode()),
        *(b"%d" % (MOST + 1), b"%d" % (LEAST - 1), b"9" * 5000),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_adding_to_a_value_that_is_not_a_64_bit_decimal_number_is_refused(text: bytes) -> None:
    store = Store()
    store.put("n", text)
    assert refusal(store.apply(Add("n", 1))) is FailureCode.NOT_A_NUMBER
    assert store.item("n").value == text
    assert store.revision == 2


@pytest.mark.parametrize(
    ("start", "amount"),
    [(MOST, 1), (LEAST, -1), (0, MOST + 1), (0, LEAST - 1), (0, 10**5000), (0, -(10**5000))],
    ids=["most + 1", "least - 1", "too much", "too little", "far too much", "far too little"],
)
def test_a_sum_that_leaves_64_bits_is_refused(start: int, amount: int) -> None:
    store = Store()
    store.put("n", b"%d" % start)
    assert refusal(store.apply(Add("n", amount))) is FailureCode.INVALID
    assert store.item("n").value == b"%d" % start


def test_the_whole_range_of_64_bits_can_be_reached() -> None:
    store = Store()
    assert store.apply(Add("n", MOST)) == AddResult(True, 2, MOST)
    assert store.apply(Add("n", -MOST)) == AddResult(True, 3, 0)
    assert store.apply(Add("n", LEAST)) == AddResult(True, 4, LEAST)


def test_adding_happens_only_if_its_compares_hold() -> None:
    store = Store()
    assert store.apply(Add("n", 5, compares=(Exists("a"),))) == AddResult(False, 1, 0)
    assert store.get("n") is None
    store.put("a")
    assert store.apply(Add("n", 5, compares=(Exists("a"), VersionIs("n", 0)))) == AddResult(True, 3, 5)


# Time


def test_a_time_that_is_nan_counts_as_the_latest_one_seen() -> None:
    store = Store()
    store.now = 10.0
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.now = math.nan
    store.apply(Tick())
    assert store.keys() == ["a"]
    assert store.engine.now == 10.0


def test_a_change_contains_the_new_item_or_none_for_a_removed_key() -> None:
    store = Store()
    watch = store.watch("")
    store.put("a", b"x")
    store.txn(Delete("a"))
    assert [batch.changes for batch in store.told[watch]] == [
        (Change("a", Item("a", b"x", 2, 2, 1)),),
        (Change("a", None),),
    ]
