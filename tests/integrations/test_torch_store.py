"""The store of a round as a torch store: one suite for TCPStore, HashStore and TorchStore.

DIFFERENCES and docs/torchrun.md list where they differ, and why; everything else is the same on all three.
"""

import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import rallypoint
from rallypoint.integrations.torchrun import TorchStore
from rallypoint.integrations.torchrun import store as module

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=30)
_numbers = itertools.count(1)

# What -> (on TCPStore, on HashStore, on ours), and why ours is so.
DIFFERENCES = {
    "add to a value that is no number": (
        "DistNetworkError",  # and every later call fails: the server drops the client
        "ValueError",
        "DistStoreError",
        "the caller is told, and the store goes on",
    ),
    "wait for a queue": ("returns", "returns", "DistStoreError", "queues are beside the keys: ask queue_len"),
    "get of a queue": ("b''", "DistStoreError", "DistStoreError", "a queue is no key"),
    "queue through a PrefixStore": (
        "returns",
        "returns",
        "NotImplementedError",
        "torch's C++ does not ask a Python store for queues",
    ),
    "clone": ("TCPStore", "HashStore", "TorchStore", "ours shares its connection, which any thread may use"),
}


@pytest.fixture
def world() -> Iterator[rallypoint.World]:
    handler = rallypoint.create_handler(f"memory://torch/store-{next(_numbers)}?min_nodes=1")
    yield handler.next_rendezvous()
    handler.close()


@pytest.fixture
def ours(world: rallypoint.World) -> Iterator[TorchStore]:
    store = TorchStore(world.store)
    yield store
    store.release()


@pytest.fixture(params=["tcp", "hash", "ours"])
def store(request: pytest.FixtureRequest) -> Any:
    match request.param:
        case "tcp":
            made = dist.TCPStore("127.0.0.1", 0, is_master=True)
        case "hash":
            made = dist.HashStore()
        case _:
            made = request.getfixturevalue("ours")
    made.set_timeout(LONG)
    return made


@pytest.fixture(params=["itself", "behind a PrefixStore"])
def face(request: pytest.FixtureRequest, store: Any) -> Any:
    """The store as Python sees it, and as C++ does."""
    return store if request.param == "itself" else dist.PrefixStore("p", store)


def outcome(call: Callable[[], Any]) -> str:
    try:
        result = call()
    except Exception as error:
        return type(error).__name__
    return "returns" if result is None else repr(result)


# --- the same on all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["text", b"", b"\x00\xff\n", "é"])
def test_value_that_is_set_can_be_read(face, value):
    assert face.set("k", value) is None
    assert face.get("k") == (value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize("key", ["", "a/b", "ключ", "with space", "x" * 1000])
def test_key_may_be_any_text(face, key):
    face.set(key, "v")
    assert face.get(key) == b"v"
    assert face.check([key]) is True


def test_get_waits_until_the_key_exists(face):
    other = face.clone()  # on TCPStore, a wait in one thread blocks the other threads of the same connection
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(face.get, "later")
        other.set("later", "now")
        assert waiting.result(30) == b"now"


def test_numbers_are_added(face):
    assert [face.add("n", 5), face.add("n", -7), face.add("n", 0)] == [5, -2, -2]
    assert face.get("n") == b"-2"


class Three:
    """An object that converts to an integer, as numpy's integers do."""

    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize("amount", [True, Three(), torch.tensor(3), torch.tensor(2.5), -(2**63), 2**63 - 1])
def test_amount_that_torch_accepts_is_added(face, amount):
    assert face.add("n", amount) == int(amount)


@pytest.mark.parametrize("amount", [1.5, 2.0, "5", b"5", None, 2**63, -(2**63) - 1], ids=repr)
def test_amount_that_torch_rejects_is_a_type_error(face, amount):
    with pytest.raises(TypeError):
        face.add("n", amount)
    assert face.add("n", 1) == 1


def test_key_that_is_written_twice_at_once_holds_the_last(face):
    face.multi_set(["a", "b", "a"], ["1", "2", "3"])
    assert face.multi_get(["a", "b"]) == [b"3", b"2"]


def test_numbers_are_added_once_each_by_many_threads(face):
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: face.add("n", 1), range(40)))
    assert sorted(seen) == list(range(1, 41))


def test_compare_set_answers_as_torch_does(face):
    assert face.compare_set("k", "expected", "new") == b"expected"
    assert face.check(["k"]) is False
    assert face.compare_set("k", "", "first") == b"first"
    assert face.compare_set("k", "wrong", "new") == b"first"
    assert face.compare_set("k", "first", "second") == b"second"
    face.set("empty", "")
    assert face.compare_set("empty", "", "filled") == b"filled"


def test_check_asks_for_all_keys_at_once(face):
    face.set("a", "1")
    assert [face.check(["a"]), face.check(["a", "b"]), face.check([])] == [True, False, True]


def test_wait_returns_when_all_keys_exist(face):
    other = face.clone()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(face.wait, ["a", "b"])
        other.set("a", "1")
        other.set("b", "2")
        assert waiting.result(30) is None
    assert face.wait([]) is None


def test_deleted_keys_are_gone(face):
    face.set("k", "v")
    assert [face.delete_key("k"), face.delete_key("k"), face.check(["k"])] == [True, False, False]


def test_keys_are_counted(face):
    before = face.num_keys()
    face.set("a", "1")
    face.add("b", 1)
    assert face.num_keys() == before + 2


def test_values_are_appended(face):
    assert face.has_extended_api() is True
    face.append("k", "a")
    face.append("k", b"b")
    assert face.get("k") == b"ab"


def test_many_keys_are_written_and_read_at_once(face):
    face.multi_set(["a", "b"], ["1", b"2"])
    assert face.multi_get(["b", "a"]) == [b"2", b"1"]
    assert face.multi_get([]) == []


@pytest.mark.parametrize("verb", ["get", "wait", "multi_get", "wait with its own"])
def test_time_out_is_a_dist_store_error_in_time(face, verb):
    face.set("there", "1")
    if verb != "wait with its own":
        face.set_timeout(SHORT)
    calls = {
        "get": lambda: face.get("absent"),
        "wait": lambda: face.wait(["there", "absent"]),
        "multi_get": lambda: face.multi_get(["there", "absent"]),
        "wait with its own": lambda: face.wait(["there", "absent"], SHORT),
    }
    began_at = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        calls[verb]()
    assert SHORT.total_seconds() * 0.9 < time.monotonic() - began_at < 10


def test_time_out_can_be_read_and_changed(face):
    face.set_timeout(timedelta(seconds=7))
    assert face.timeout == timedelta(seconds=7)
    with pytest.raises(TypeError):
        face.set_timeout(7)


def test_queues_are_first_in_first_out(store):
    for item in ("1", b"2", "3"):
        store.queue_push("q", item)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q"), store.queue_pop("q", False), store.queue_pop("q", block=True)] == [b"1", b"2", b"3"]
    assert store.queue_len("q") == 0
    assert "q" not in store.list_keys()


def test_pop_of_an_empty_queue_waits_or_raises(store):
    with pytest.raises(dist.QueueEmptyError) as caught:
        store.queue_pop("q", block=False)
    assert str(caught.value) == "queue is empty"
    other = store.clone()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.queue_pop, "q")
        other.queue_push("q", "late")
        assert waiting.result(30) == b"late"
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        store.queue_pop("q")


def test_every_item_of_a_queue_is_popped_once(store):
    with ThreadPoolExecutor(4) as pool:
        popped = [pool.submit(store.clone().queue_pop, "q") for _ in range(20)]
        other = store.clone()
        for number in range(20):
            other.queue_push("q", str(number))
        assert sorted(int(one.result(30)) for one in popped) == list(range(20))


def test_keys_are_listed(store):
    store.set("a", "1")
    store.set("b/c", "2")
    assert sorted(store.list_keys()) == ["a", "b/c"]


def test_barrier_of_newer_torch_works(face):
    if not hasattr(face, "barrier"):
        pytest.skip("this torch has none")
    face.barrier("b", 1)
    with pytest.raises(dist.DistStoreError):
        face.barrier("c", 2, SHORT)


def test_wrong_types_are_type_errors(store):
    for call in (lambda: store.set("k", 3), lambda: store.set(3, "v"), lambda: store.wait("ab", SHORT)):
        with pytest.raises(TypeError):
            call()


# --- the differences ------------------------------------------------------------------------------------------------


def test_differences_are_those_that_are_listed(world):
    def stores() -> tuple[Any, ...]:
        made = (dist.TCPStore("127.0.0.1", 0, is_master=True), dist.HashStore(), TorchStore(world.store))
        for one in made:
            one.set_timeout(SHORT)
        return made

    def text(one: Any) -> Any:
        one.set("text", "x")
        return one.add("text", 1)

    def queue(one: Any) -> Any:
        one.queue_push("q", "1")
        return one

    seen = {
        "add to a value that is no number": [outcome(lambda one=one: text(one)) for one in stores()],
        "wait for a queue": [outcome(lambda one=one: queue(one).wait(["q"])) for one in stores()],
        "get of a queue": [outcome(lambda one=one: queue(one).get("q")) for one in stores()],
        "queue through a PrefixStore": [
            outcome(lambda one=one: dist.PrefixStore("p", one).queue_push("q", "1")) for one in stores()
        ],
        "clone": [outcome(lambda one=one: type(one.clone()).__name__).strip("'") for one in stores()],
    }
    assert {what: tuple(words) for what, words in seen.items()} == {
        what: words[:3] for what, words in DIFFERENCES.items()
    }


# --- TorchStore alone -----------------------------------------------------------------------------------------------


def test_message_of_a_time_out_is_that_of_tcp_store_and_says_what_was_missing(ours):
    ours.set("there", "1")
    with pytest.raises(dist.DistStoreError) as caught:
        ours.wait(["there", "absent"], SHORT)
    assert str(caught.value).startswith("wait timeout after 200ms, keys: /there, /absent")
    assert "missing after 0.2 s: absent" in str(caught.value)
    assert isinstance(caught.value.__cause__, rallypoint.StoreTimeoutError)


def test_zero_time_out_means_to_wait_forever(ours):
    ours.set_timeout(timedelta(0))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ours.get, "later")
        ours.set("later", "now")
        assert waiting.result(30) == b"now"


def test_store_that_only_cpp_refers_to_stays_alive(world):
    behind = dist.PrefixStore("p", TorchStore(world.store))
    twin = behind.clone()
    behind.set("k", "v")
    assert twin.get("k") == b"v"


def test_store_is_released_once_its_round_has_ended(world):
    first = TorchStore(world.store)
    assert first in module._kept_alive
    world.store._owner.close()
    handler = rallypoint.create_handler("memory://torch/another?min_nodes=1")
    TorchStore(handler.next_rendezvous().store).release()
    assert first not in module._kept_alive
    with pytest.raises(dist.DistStoreError):
        first.set("k", "v")
    handler.close()


def test_clone_has_the_same_keys_and_a_time_out_of_its_own(ours):
    ours.set_timeout(timedelta(seconds=3))
    twin = ours.clone()
    twin.set("k", "v")
    twin.set_timeout(timedelta(seconds=4))
    assert (ours.get("k"), ours.timeout) == (b"v", timedelta(seconds=3))


def test_pickling_a_store_is_an_error_that_says_what_to_do(ours):
    with pytest.raises(TypeError, match="MASTER_ADDR:MASTER_PORT"):
        pickle.dumps(ours)


def test_store_of_a_round_that_was_left_refuses_to_write(world, ours):
    world.store._owner.leave("enough")
    with pytest.raises(dist.DistStoreError) as caught:
        ours.set("k", "v")
    assert "no longer a member of round" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_store_in_a_forked_process_is_an_error(ours):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, (outcome(lambda: ours.get("k")) + " " + _said(lambda: ours.set("k", "v"))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 10_000).decode()
    os.close(reading)
    os.close(writing)
    assert said.startswith("DistStoreError")
    assert "was inherited by a fork" in said


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"


def test_wait_in_one_thread_does_not_block_another(ours):
    behind = dist.PrefixStore("p", ours)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(behind.get, "later")
        assert behind.add("n", 1) == 1
        behind.set("later", "now")
        assert waiting.result(30) == b"now"
