"""Backend, store and handler suites on real cells in real time: a file, and torch stores.

The checks of a suite run concurrently, each with a cell of its own, because they mostly wait.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from rallypoint.backends.register.connect import open_cell
from rallypoint.backends.register.file_cell import FileCell
from rallypoint.backends.register.store_cell import StoreCell
from rallypoint.backends.schemes import register_backend
from rallypoint.handler import Handler
from rallypoint.settings import Settings
from rallypoint.testing.conformance.backend import backend_checks, run_checks
from rallypoint.testing.conformance.handler import HANDLER_CHECKS, HandlerKit, run_handler_checks
from rallypoint.testing.conformance.handler_kit import SHORT
from rallypoint.testing.conformance.store import STORE_CHECKS, StoreKit, run_store_checks
from tests.patience import until_let_go, users
from tests.register.kit import backend_kit, connector
from tests.register.stores import STORES, store_maker

KINDS = ("path", *STORES)
ALL_S = 200.0
"""A suite that takes longer hangs."""
IDLE_S = 0.25


class Cells:
    """Fresh cells of one kind, by name."""

    def __init__(self, kind, folder, stack):
        self.kind = kind
        self.folder = folder
        self._make_store = None if kind == "path" else stack.enter_context(store_maker(kind, folder))

    def maker(self, name):
        if self._make_store is None:
            return lambda: FileCell(self.folder / name)
        if self.kind == "tcp":  # a hundred concurrent clients of torch's server stall for seconds: one per check
            store = self._make_store()
            return lambda: StoreCell(store, name)
        return lambda: StoreCell(self._make_store(), name)


@pytest.fixture(params=KINDS)
def cells(request, tmp_path):
    with ExitStack() as stack:
        yield Cells(request.param, tmp_path, stack)


def assert_all_conform(reports) -> None:
    failed = [str(report) for report in reports if not report.conforming]
    assert not failed, "\n".join(failed)


def gather(coros):
    async def all_of_them():
        limit = asyncio.Semaphore(5)  # so few at a time that none has to wait for a processor

        async def one(coro):
            async with limit:
                return await coro

        async with asyncio.timeout(ALL_S):
            return await asyncio.gather(*map(one, coros))

    return asyncio.run(all_of_them())


def test_backend_conforms_on_real_cells(cells):
    def coros():
        for check in backend_checks():
            make = cells.maker(check.__name__)
            kit = backend_kit(make, ttl_s=2.0, lease_slack_s=2.5, patience_s=60.0, idle_s=IDLE_S)
            yield run_checks(kit, [check])

    assert_all_conform(gather(coros()))


def test_store_conforms_on_real_cells(cells):
    def coros():
        for check in STORE_CHECKS:
            connect = connector(cells.maker(check.__name__), idle_s=IDLE_S)
            kit = StoreKit(
                connect, asyncio.sleep, run_id="run", lease_slack_s=2.5, ttl_s=6.0, late_s=10.0, patience_s=90.0
            )
            yield run_store_checks(kit, [check])

    assert_all_conform(gather(coros()))


def test_handlers_conform_on_real_cells(cells):
    shared = {}

    async def open_one(settings):
        cell = shared.setdefault(settings.run_id, cells.maker(settings.run_id)())
        return await open_cell(cell, settings)

    scheme = f"cells-{cells.kind}"
    register_backend(scheme, open_one)
    options = {**SHORT, "keep_alive_interval": 1.0, "last_call_timeout": 1.0}

    def create(run_id, more):
        return Handler(Settings.build(scheme=scheme, run_id=run_id, **more))

    from rallypoint.backends import schemes

    before = users()
    try:
        with ThreadPoolExecutor(4) as threads:
            kit = HandlerKit(create, "run", options, patience_s=60.0)
            calls = [threads.submit(run_handler_checks, kit, [check]) for check in HANDLER_CHECKS]
            reports = [call.result(ALL_S) for call in calls]
    finally:
        del schemes._openers[scheme]
    until_let_go(before)
    assert_all_conform(reports)


def test_handlers_conform_at_a_url(tmp_path):
    """The scheme `file`, as in a user's URL."""
    before = users()
    with ThreadPoolExecutor(4) as threads:
        kit = HandlerKit.at(f"file://{tmp_path}", "run", keep_alive_interval=1.0, last_call_timeout=1.0)
        calls = [threads.submit(run_handler_checks, kit, [check]) for check in HANDLER_CHECKS]
        reports = [call.result(ALL_S) for call in calls]
    until_let_go(before)
    assert_all_conform(reports)
