"""What a run of a thousand nodes costs a browser that shows it: `python bench/dashboard.py [--nodes N] [--json]`.

A real `rallypoint serve --http`, real nodes of `rallypoint.aio` in a few processes, a real Chromium. Measured inside
the browser: the time until the first view is complete, the wall time of each update (script, style and layout), and
from a trace the CPU time of the busiest task of the page's main thread during the updates.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rallypoint.api import free_port
from rallypoint.bench.node_pool import Action, Event, NodePool
from rallypoint.bench.processes import fork, kill_all, raise_file_limit
from rallypoint.bench.rallypoint_side import HOST, run_url, serve
from rallypoint.bench.shared_nodes import run_nodes
from rallypoint.bench.sides import RunConfig

FIRST_VIEW_S, UPDATE_MS = 2.0, 100.0
LIMIT_S = 120.0
PROCESSES = 4
RUN = "bench-page"
# Before any script of the page: notes how long each message keeps the main thread, and every long task.
PROBE = """
window.probe = {updates: [], whole: null};
const add = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (kind, handle) {
  add.call(this, kind, (event) => {
    const began = performance.now();
    handle(event);
    document.body.getBoundingClientRect();
    if (kind !== 'update') return;
    window.probe.updates.push([performance.now() - began, event.data.length]);
    requestAnimationFrame(() => setTimeout(() => {
      const shown = document.querySelector('.tile .number')?.textContent.replace(',', '');
      if (window.probe.whole === null && shown === String(window.nodes)) window.probe.whole = performance.now();
    }));
  });
};
"""


@contextmanager
def nodes_in_a_round(count: int) -> Iterator[tuple[NodePool, str]]:
    """Start a server with a page and nodes in their first round; the address of the page."""
    page = f"{HOST}:{free_port()}"
    server, port = serve("--http", page)
    try:
        config = RunConfig(RUN, max(1, count * 8 // 10), count, join_timeout_s=int(LIMIT_S))
        hosted = [tuple(range(first, count, PROCESSES)) for first in range(PROCESSES)]
        url = run_url(port, config) + "&labels=zone%3Da%2Brack%3D7"
        with NodePool(hosted, lambda number: fork(lambda sock: run_nodes(sock, hosted[number], url))) as pool:
            pool.wait_for(Event.READY, pool.nodes, time.monotonic() + LIMIT_S)
            pool.send(Action.JOIN, pool.nodes)
            pool.wait_for_world(pool.nodes, time.monotonic() + LIMIT_S)
            yield pool, f"http://{page}/?run={RUN}"
    finally:
        kill_all([server])


def look(browser: Any, address: str, count: int) -> Any:
    """Open a page and wait until it shows all nodes."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script(f"window.nodes = {count};{PROBE}")
    page.goto(address)
    until(page, "window.probe.whole !== null")
    return page


def until(page: Any, condition: str) -> None:
    """Wait for a condition, evaluated from outside: the page's policy forbids to evaluate text inside it."""
    deadline = time.monotonic() + LIMIT_S
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {condition}")
        page.wait_for_timeout(50)


def number(tile: str) -> str:
    """JavaScript for the number in a tile."""
    return f"Number(document.querySelector('.tile[data-state=\"{tile}\"] .number').textContent.replace(',', ''))"


def busiest_task_ms(trace: Any) -> float:
    """The most CPU time of one task of a page's main thread."""
    named = [one for one in trace["traceEvents"] if one["name"] == "thread_name"]
    mains = {(one["pid"], one["tid"]) for one in named if one["args"]["name"] == "CrRendererMain"}
    tasks = [one for one in trace["traceEvents"] if "tdur" in one and (one["pid"], one["tid"]) in mains]
    return max(one["tdur"] for one in tasks) / 1000


def measure(count: int, repetitions: int, chromium: str, shots: Path | None) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    with nodes_in_a_round(count) as (pool, address), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        first = []
        for _ in range(repetitions):
            page = look(browser, address, count)
            first.append(page.evaluate("window.probe.whole") / 1000)
            page.context.close()
        page = look(browser, address, count)
        page.evaluate("window.probe.updates.length = 0")
        browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
        pool.kill(count // 2)
        until(page, f"{number('lost')} === 1")
        lost = [count // 2, *range(3, count - 1, 20)]
        for node in lost[1:]:
            pool.kill(node)
        until(page, f"{number('lost')} >= {len(set(lost))}")
        if shots is not None:
            page.wait_for_timeout(1500)
            page.screenshot(path=shots / "many-lost.png", full_page=True)
        left = [node for node in pool.nodes if node not in set(lost)]
        pool.send(Action.FOLLOW, left)
        pool.wait_for_world(left, time.monotonic() + LIMIT_S)
        until(page, f"{number('member')} === {len(left)} && {number('lost')} === 0")
        page.wait_for_timeout(1000)
        if shots is not None:
            page.screenshot(path=shots / "many-again.png", full_page=True)
        updates = page.evaluate("window.probe.updates")
        busiest = busiest_task_ms(json.loads(browser.stop_tracing()))
        browser.close()
    busy = [took for took, _ in updates]
    return {
        "benchmark": "dashboard",
        "nodes": count,
        "first_view_s": {"median": statistics.median(first), "most": max(first)},
        "updates": len(busy),
        "update_ms": {"median": statistics.median(busy), "most": max(busy)},
        "largest_update_bytes": max(size for _, size in updates),
        "busiest_task_cpu_ms": busiest,
        "met": max(first) < FIRST_VIEW_S and busiest < UPDATE_MS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert-target", action="store_true")
    parser.add_argument("--shots", type=Path, help="a directory for pictures of the page")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options, _ = parser.parse_known_args()
    try:
        import playwright  # noqa: F401
    except ImportError:
        options.chromium = None
    if options.chromium is None:
        print("skipped: this needs chromium and the package playwright", file=sys.stderr)
        return 0
    raise_file_limit()
    found = measure(options.nodes, options.repetitions, options.chromium, options.shots)
    if options.json:
        print(json.dumps(found))
    else:
        first, update = found["first_view_s"], found["update_ms"]
        print(f"{found['nodes']} nodes on the page; targets: {FIRST_VIEW_S:g} s, {UPDATE_MS:g} ms of CPU")
        print(f"  first view     median {first['median']:.2f} s, most {first['most']:.2f} s")
        print(f"  busiest task   {found['busiest_task_cpu_ms']:.0f} ms of CPU")
        print(f"  update, wall   median {update['median']:.1f} ms, most {update['most']:.1f} ms of {found['updates']}")
        print(f"  largest update {found['largest_update_bytes']:,} bytes")
    return 1 if options.assert_target and not found["met"] else 0


if __name__ == "__main__":
    sys.exit(main())
