"""A script that uses every public name of torch's API. `python every_name.py PACKAGE FOLDER`.

PACKAGE is torch.distributed.elastic.rendezvous or rallypoint.compat.rendezvous; only the import depends on it. It
runs two nodes in threads over a backend of its own, then one over the registry, and prints what it observes, which must
be the same for both packages.
"""

import importlib
import json
import sys
import threading
from datetime import timedelta

package, folder = sys.argv[1:3]
rendezvous = importlib.import_module(package)
api = importlib.import_module(f"{package}.api")
registry = importlib.import_module(f"{package}.registry")
dynamic = importlib.import_module(f"{package}.dynamic_rendezvous")
c10d = importlib.import_module(f"{package}.c10d_rendezvous_backend")
utils = importlib.import_module(f"{package}.utils")

seen: dict[str, object] = {}


class MyBackend(dynamic.RendezvousBackend):
    """A cell in this process, as a user of torch writes it."""

    def __init__(self) -> None:
        self.state, self.version, self.lock = None, 0, threading.Lock()
        self.callers = set()

    @property
    def name(self):
        return "mine"

    def get_state(self):
        with self.lock:
            self.callers.add(threading.current_thread().name)
            return None if self.state is None else (self.state, self.version)

    def set_state(self, state, token=None):
        with self.lock:
            if (token or 0) != self.version:
                return (self.state, self.version, False)
            self.state, self.version = state, self.version + 1
            return (state, self.version, True)


class MyStore(dict):
    """A user's own store, for a process without torch."""

    def set(self, key, value):
        self[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self[key]


def make_store():
    if package.startswith("torch") or "torch" in sys.argv[3:]:
        import torch.distributed as dist

        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=5))
        return store
    return MyStore()


def use_names():
    for name in rendezvous.__all__:
        assert getattr(rendezvous, name) is getattr(api, name), name
    for kind in ("Closed", "Timeout", "Connection", "State", "GracefulExit"):
        error = getattr(rendezvous, f"Rendezvous{kind}Error")
        assert issubclass(error, rendezvous.RendezvousError)
        assert str(error("text")) == "text"
    seen["endpoint"] = [
        utils.parse_rendezvous_endpoint(text, 29400) for text in (None, "", "head", "head:1", "[fd00::7]:2", "1.2.3.4")
    ]
    for text in ("head:70000", "head:x", "he ad:1"):
        try:
            utils.parse_rendezvous_endpoint(text, 1)
        except ValueError:
            continue
        raise AssertionError(text)


def use_parameters():
    parameters = rendezvous.RendezvousParameters(
        backend="mine", endpoint="e", run_id="r", min_nodes=1, max_nodes=2, local_addr="here", a="yes", b=" 7 ", c=0
    )
    seen["parameters"] = [
        parameters.backend,
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        parameters.config,
        parameters.get("a"),
        parameters.get("z", "default"),
        parameters.get_as_bool("a"),
        parameters.get_as_bool("c"),
        parameters.get_as_bool("z"),
        parameters.get_as_bool("z", True),
        parameters.get_as_int("b"),
        parameters.get_as_int("z"),
        parameters.get_as_int("z", 3),
    ]
    wrong = [
        lambda: rendezvous.RendezvousParameters("", "e", "r", 1, 1),
        lambda: rendezvous.RendezvousParameters("b", "e", "r", 0, 1),
        lambda: rendezvous.RendezvousParameters("b", "e", "r", 2, 1),
        lambda: rendezvous.RendezvousParameters("b", "e", "r", 1, 1, x="01").get_as_bool("x"),
        lambda: rendezvous.RendezvousParameters("b", "e", "r", 1, 1, x=2).get_as_bool("x"),
        lambda: rendezvous.RendezvousParameters("b", "e", "r", 1, 1, x="1a").get_as_int("x"),
        lambda: dynamic.RendezvousTimeout(join=timedelta(0)),
        lambda: dynamic.DynamicRendezvousHandler.from_backend("", make_store(), MyBackend(), 1, 1),
        lambda: dynamic.DynamicRendezvousHandler.from_backend("r", make_store(), MyBackend(), 0, 1),
        lambda: dynamic.DynamicRendezvousHandler.from_backend("r", make_store(), MyBackend(), 2, 1),
        lambda: c10d.C10dRendezvousBackend(make_store(), ""),
        lambda: registry.get_rendezvous_handler(rendezvous.RendezvousParameters("nobody's", "e", "r", 1, 1)),
    ]
    for attempt in wrong:
        try:
            attempt()
        except ValueError:
            continue
        raise AssertionError(attempt)
    timeout = dynamic.RendezvousTimeout(last_call=timedelta(seconds=1))
    limits = (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)
    seen["timeouts"] = [limit.total_seconds() for limit in limits]


def use_handlers():
    backend, store = MyBackend(), make_store()
    timeout = dynamic.RendezvousTimeout(
        join=timedelta(seconds=60), last_call=timedelta(seconds=1), close=timedelta(seconds=10)
    )
    handlers = [
        dynamic.DynamicRendezvousHandler.from_backend(
            run_id="names",
            store=store,
            backend=backend,
            min_nodes=2,
            max_nodes=2,
            local_addr="localhost",
            timeout=timeout,
            keep_alive_interval=1,
            keep_alive_max_attempt=5,
        )
        for _ in range(2)
    ]
    assert all(isinstance(handler, rendezvous.RendezvousHandler) for handler in handlers)
    settings = handlers[0].settings
    assert isinstance(settings, dynamic.RendezvousSettings)
    seen["settings"] = [
        settings.run_id,
        settings.min_nodes,
        settings.max_nodes,
        settings.timeout.join.total_seconds(),
        settings.keep_alive_interval.total_seconds(),
        settings.keep_alive_max_attempt,
    ]
    seen["handler"] = [handlers[0].get_backend(), handlers[0].get_run_id(), handlers[0].is_closed()]
    infos = together(handlers)
    assert all(isinstance(info, rendezvous.RendezvousInfo) for info in infos)
    by_rank = sorted(infos, key=lambda info: info.rank)
    seen["ranks"] = [(info.rank, info.world_size) for info in by_rank]
    by_rank[0].store.set("greeting", b"hello")
    seen["store"] = by_rank[1].store.get("greeting").decode()
    places = [info.bootstrap_store_info for info in by_rank]
    assert all(isinstance(place, rendezvous.RendezvousStoreInfo) for place in places)
    assert places[0].master_addr == places[1].master_addr == "localhost"
    assert places[0].master_port == places[1].master_port > 0
    seen["waiting"] = [handler.num_nodes_waiting() for handler in handlers]
    again = sorted(together(handlers), key=lambda info: info.rank)
    seen["again"] = [(info.rank, info.world_size) for info in again]
    try:
        seen["other round"] = again[1].store.get("greeting").decode()
    except Exception:
        seen["other round"] = "nothing"
    handlers[0].set_closed()
    seen["closed"] = handlers[0].is_closed()
    try:
        handlers[1].next_rendezvous()
    except rendezvous.RendezvousClosedError:
        seen["late"] = "closed"
    seen["shutdown"] = [handler.shutdown() for handler in handlers]
    assert threading.current_thread().name not in backend.callers or package.startswith("torch")


def together(handlers):
    results = [None] * len(handlers)

    def join(number):
        results[number] = handlers[number].next_rendezvous()

    threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(results), results
    return results


def use_registry():
    made = []

    def create(params):
        handler = dynamic.create_handler(make_store(), MyBackend(), params)
        made.append(handler)
        return handler

    creator: rendezvous.RendezvousHandlerCreator = create
    for known in (rendezvous.rendezvous_handler_registry, rendezvous.RendezvousHandlerRegistry()):
        known.register("mine", creator)
        known.register("mine", creator)
        try:
            known.register("mine", lambda params: None)
        except ValueError:
            pass
        else:
            raise AssertionError("registered twice")
    params = rendezvous.RendezvousParameters("mine", "", "one", 1, 1, join_timeout="60", last_call_timeout=1)
    handler = registry.get_rendezvous_handler(params)
    assert handler is made[0]
    info = handler.next_rendezvous()
    seen["registry"] = [
        handler.get_backend(),
        info.rank,
        info.world_size,
        handler.settings.timeout.join.total_seconds(),
    ]
    assert handler.shutdown()
    other = rendezvous.RendezvousHandlerRegistry()
    other.register("another", creator)
    try:
        other.create_handler(rendezvous.RendezvousParameters("another", "", "one", 1, 1))
    except RuntimeError:
        seen["wrong name"] = "RuntimeError"


def use_c10d():
    if not (package.startswith("torch") or "torch" in sys.argv[3:]):
        return
    params = rendezvous.RendezvousParameters(
        "c10d", f"{folder}/store-{package}", "c", 1, 1, store_type="file", join_timeout=60, last_call_timeout=1
    )
    backend, _ = c10d.create_backend(params)
    assert isinstance(backend, c10d.C10dRendezvousBackend)
    state, token, has_set = backend.set_state(b"x", None)
    seen["c10d"] = [backend.name, state.decode(), has_set, backend.get_state()[0].decode()]
    assert backend.set_state(b"y", token)[2]


def build_info():
    store = make_store()
    info = rendezvous.RendezvousStoreInfo.build(0, store, local_addr="here", server_port=4711)
    other = rendezvous.RendezvousStoreInfo.build(1, store, local_addr=None)
    seen["built"] = [info.master_addr, info.master_port, info == other]
    keys = rendezvous.RendezvousStoreInfo
    seen["keys"] = [keys.MASTER_ADDR_KEY, keys.MASTER_PORT_KEY]
    plain = rendezvous.RendezvousInfo(store, 0, 1, info)
    seen["info"] = [plain.rank, plain.world_size, plain.store is store, plain.bootstrap_store_info is info]


def subclass():
    class MyHandler(rendezvous.RendezvousHandler):
        def get_backend(self):
            return "my handler"

        def next_rendezvous(self):
            return rendezvous.RendezvousInfo(make_store(), 0, 1, rendezvous.RendezvousStoreInfo("a", 1))

        def is_closed(self):
            return False

        def set_closed(self):
            pass

        def num_nodes_waiting(self):
            return 0

        def get_run_id(self):
            return "r"

        def shutdown(self):
            return True

    known = rendezvous.RendezvousHandlerRegistry()
    known.register("my handler", lambda params: MyHandler())
    handler = known.create_handler(rendezvous.RendezvousParameters("my handler", "", "r", 1, 1))
    seen["subclass"] = [handler.use_agent_store, handler.next_rendezvous().world_size]


use_names()
use_parameters()
build_info()
subclass()
use_handlers()
use_registry()
use_c10d()
print(json.dumps(seen))
