"""The metrics of a node, from its events and its handler, and those of followed runs, on any backend."""

import asyncio

from prometheus_client.registry import CollectorRegistry

import rallypoint
from rallypoint.backends.memory import MemoryBackend
from rallypoint.events import (
    BackendReachable,
    BackendUnreachable,
    JoinFailed,
    JoinStarted,
    NodeLost,
    RenewalMissed,
    RoundEntered,
    SessionLost,
    WorldChanged,
)
from rallypoint.kv.types import Put
from rallypoint.observe.follower import Follower
from rallypoint.observe.metrics import NodeMetrics, RunMetrics
from rallypoint.observe.metrics.node import MAX_ERRORS
from rallypoint.observe.metrics.table import TABLE, Exporter
from rallypoint.observe.report import Counts, Phase, Report
from rallypoint.rendezvous.records import BudgetRecord, ConfigRecord, encode
from tests.observe.metrics_kit import scrape
from tests.patience import unique
from tests.rendezvous.kit import CheckedWorld, run_scenario

WHO = {"run_id": "r", "by": "a"}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_node_exposes_every_metric_defined_for_nodes():
    metrics = NodeMetrics()
    handler = rallypoint.create_handler(f"memory://{unique()}/run?min_nodes=1&name=a", sinks=[metrics])
    metrics.attend(handler)
    handler.next_rendezvous()
    metrics(JoinFailed(**WHO, error="RendezvousTimeoutError", reason="nobody came"))
    found = scrape(metrics.registry)
    assert found.ours() == {metric.name for metric in TABLE if metric.exporter in (Exporter.NODE, Exporter.DECISIONS)}
    assert found("rallypoint_node_info", run="run", node="a", backend="memory") == 1
    assert (found("rallypoint_node_round"), found("rallypoint_node_rank"), found("rallypoint_node_world_size")) == (
        1,
        0,
        1,
    )
    assert found("rallypoint_node_nodes_waiting") == 0
    assert found("rallypoint_node_join_seconds_count") == 1
    assert found("rallypoint_rounds_total", outcome="active") == 1, "it is its own coordinator"
    handler.shutdown()
    assert scrape(metrics.registry)("rallypoint_node_round") == 0


def test_scrape_of_a_node_that_has_not_joined_opens_no_backend():
    metrics = NodeMetrics()
    handler = rallypoint.create_handler("tcp://127.0.0.1:1/run?min_nodes=2&read_timeout=600", sinks=[metrics])
    metrics.attend(handler)
    found = scrape(metrics.registry)
    assert found("rallypoint_node_joins_total") == 0
    assert found("rallypoint_node_nodes_waiting") is None
    handler.leave()


def test_events_are_counted_by_their_fields():
    clock = Clock()
    metrics = NodeMetrics(clock)
    metrics(JoinStarted(**WHO, join=1))
    clock.now += 3
    metrics(RoundEntered(**WHO, round=4, rank=1, world_size=2))
    metrics(WorldChanged(**WHO, round=4, cause="session lost", reason="it paused"))
    metrics(WorldChanged(**WHO, round=4, cause="made up", reason="?"))
    metrics(RenewalMissed(**WHO, reason="late"))
    metrics(NodeLost(**WHO, node="b", round=4, reason="gone"))
    metrics(NodeLost(**WHO, node="c", round=0, reason="gone"))
    metrics(BackendUnreachable(**WHO, reason="no answer"))
    found = scrape(metrics.registry)
    assert found("rallypoint_node_join_seconds_sum") == 3
    assert found("rallypoint_node_join_seconds_bucket", le="2.5") == 0
    assert found("rallypoint_node_join_seconds_bucket", le="5.0") == 1
    assert found("rallypoint_node_world_changes_total", cause="session_lost") == 1
    assert sum(found.samples[key] for key in found.samples if key[0] == "rallypoint_node_world_changes_total") == 1
    assert found("rallypoint_nodes_lost_total", standing="member") == found(
        "rallypoint_nodes_lost_total", standing="other"
    )
    assert (found("rallypoint_node_round"), found("rallypoint_node_backend_reachable")) == (4, 0)
    metrics(BackendReachable(**WHO, after_s=2.5))
    metrics(SessionLost(**WHO, reason="it ended"))
    found = scrape(metrics.registry)
    assert (found("rallypoint_node_round"), found("rallypoint_node_rank")) == (0, -1)
    assert found("rallypoint_node_backend_reachable") == 1
    assert found("rallypoint_node_backend_outage_seconds_sum") == 2.5
    assert found("rallypoint_node_backend_outage_seconds_count") == 1


def test_error_classes_make_a_bounded_number_of_series():
    metrics = NodeMetrics()
    for number in range(3 * MAX_ERRORS):
        metrics(JoinFailed(**WHO, error=f"Error{number}", reason="?"))
    assert len(scrape(metrics.registry).families["rallypoint_node_join_failures"].samples) == MAX_ERRORS


# --- runs that are followed -------------------------------------------------------------------------------------------


def test_followed_run_shows_members_waiting_and_spares():
    metrics = RunMetrics()
    assert isinstance(metrics.registry, CollectorRegistry)

    async def case(world: CheckedWorld) -> None:
        backend = MemoryBackend(world.server)

        async def follow() -> None:
            async for report in Follower(backend, world.keys, "memory://"):
                metrics.take(report)

        following = asyncio.create_task(follow())
        await world.join_all("a", "b", "c")
        world.enter("d")
        await asyncio.sleep(5.0)
        found = scrape(metrics.registry)
        run = world.keys.run_id
        assert found("rallypoint_run_members", run=run) == 3
        assert found("rallypoint_run_spares", run=run) == 1
        assert (found("rallypoint_run_waiting", run=run), found("rallypoint_run_open_places", run=run)) == (0, 0)
        assert (found("rallypoint_run_active", run=run), found("rallypoint_run_round", run=run)) == (1, 1)
        world.crash("a")
        await asyncio.sleep(60.0)
        found = scrape(metrics.registry)
        assert (found("rallypoint_run_members", run=run), found("rallypoint_run_gone", run=run)) == (2, 1)
        assert found("rallypoint_run_waiting", run=run) == 1
        assert found("rallypoint_run_restarts_limit", run=run) == 0
        config = world.record(ConfigRecord, world.keys.config)
        assert config is not None
        used = BudgetRecord(incarnation=config.incarnation, used=2, limit=3, why="rank 3 on b exited with 1")
        await backend.txn([], [Put(world.keys.budget, encode(used), config.run_lease)])
        await asyncio.sleep(1.0)
        found = scrape(metrics.registry)
        restarts = found("rallypoint_run_restarts", run=run), found("rallypoint_run_restarts_limit", run=run)
        assert restarts == (2, 3)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await backend.close()
        metrics.forget(run)
        assert scrape(metrics.registry).ours() == set()

    run_scenario(case, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_followed_runs_beyond_the_first_share_their_series():
    metrics = RunMetrics(max_runs=3)
    for number in range(10_000):
        metrics.take(
            Report(run_id=f"run{number}", where="", revision=1, phase=Phase.ACTIVE, counts=Counts(member=2, waiting=1))
        )
    metrics.take(Report(run_id="none", where="", revision=1, phase=Phase.ABSENT))
    found = scrape(metrics.registry)
    assert {sample.labels["run"] for sample in found.families["rallypoint_run_members"].samples} == {
        "run0",
        "run1",
        "run2",
        "",
    }
    assert found("rallypoint_run_members", run="") == 2 * 9_997
    assert found("rallypoint_run_active", run="") == 9_997


def test_hostile_run_id_stays_a_label():
    metrics = RunMetrics()
    name = 'a"} 1\nrallypoint_run_members{run="b'
    metrics.take(Report(run_id=name, where="", revision=1, phase=Phase.ACTIVE, counts=Counts(member=2)))
    assert scrape(metrics.registry)("rallypoint_run_members", run=name) == 2
