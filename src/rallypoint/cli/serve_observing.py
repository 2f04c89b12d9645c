"""The options `--metrics` and `--events` of `rallypoint serve`, and what they start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import click

from rallypoint.cli.serve_limits import Size

if TYPE_CHECKING:
    from rallypoint.events import Sink
    from rallypoint.server.server import Server

METRICS_PORT = 9400
LOOPBACK = "127.0.0.1"


def observing_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option(
                "--metrics",
                metavar="[ADDR:]PORT",
                help="Serve metrics for Prometheus there, at /metrics, to everybody who can reach it; without an "
                "address: on loopback. Needs rallypoint[dashboard].",
            ),
            click.option(
                "--metrics-runs",
                type=click.IntRange(min=0),
                default=200,
                show_default=True,
                metavar="N",
                help="With --metrics or --http: the number of runs with metrics of their own; the others share theirs.",
            ),
            click.option(
                "--events",
                "events_file",
                type=click.Path(dir_okay=False),
                metavar="FILE",
                help="Write every event to this file, a JSON object a line, besides the log on stderr; it is "
                "rotated, and five old ones are kept.",
            ),
            click.option(
                "--events-size",
                type=Size(),
                default="16MiB",
                show_default=True,
                help="With --events: the size at which the file is rotated.",
            ),
        )
    ):
        command = option(command)
    return command


def metrics_address(given: str) -> tuple[str, int]:
    """Host and port of `--metrics`: a port alone is one of loopback. SettingsError."""
    from rallypoint.urls import parse_endpoint

    text = given.strip()
    if text.startswith(":") or text.isdecimal():
        text = f"{LOOPBACK}:{text.removeprefix(':')}"
    return parse_endpoint(text, METRICS_PORT, lowest_port=0)


@dataclass(slots=True)
class Observers:
    """For a server: sinks for its events, and `attach`, to be called before it listens."""

    sinks: tuple[Sink, ...] = ()
    attach: Callable[[Server], None] = field(default=lambda _: None)
    metrics: Callable[[], tuple[bytes, str]] | None = None

    def exposition(self) -> tuple[bytes, str]:
        """The text of all metrics and its content type, once `attach` was called."""
        assert self.metrics is not None
        return self.metrics()


@contextmanager
def observed(
    metrics: str | None, metrics_runs: int, events_file: str | None, events_size: int, *, has_page: bool = False
) -> Iterator[Observers]:
    """Closed on exit. RallypointError if a file or an address cannot be used."""
    with ExitStack() as stack:
        observers = Observers()
        if events_file is not None:
            from rallypoint.observe.sinks import JsonLines
            from rallypoint.server.process import print_event

            events = JsonLines(events_file, max_bytes=events_size, tell=print_event)
            stack.callback(events.close)
            observers.sinks = (events,)
        if metrics is not None or has_page:
            observers.attach = _attaching(observers, metrics, metrics_runs, stack)
        yield observers


def _attaching(observers: Observers, metrics: str | None, most_runs: int, stack: ExitStack) -> Callable[[Server], None]:
    try:
        from rallypoint.observe.metrics import exposition, serve_metrics, server_registry
    except ImportError as error:
        raise click.ClickException(f"--metrics cannot be served: {error}") from None
    from rallypoint.events import MetricsListen

    address = None if metrics is None else metrics_address(metrics)

    def attach(server: Server) -> None:
        registry = server_registry(server, max_runs=most_runs)
        observers.metrics = partial(exposition, registry)
        if address is not None:
            listener = serve_metrics(registry, *address)
            stack.callback(listener.close)
            server.emit(MetricsListen(run_id="", by=server.name, address=listener.address))

    return attach
