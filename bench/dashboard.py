"""What a run of a thousand nodes costs the browser that looks at it: `python bench/dashboard.py [--nodes N] [--json]`.

A real `rallypoint serve --http`, real nodes of `rallypoint.aio` in a few processes, a real Chromium. Measured inside
the browser: the time until the first view is whole; how long each update takes (script, style and layout, by the clock
on the wall); and the CPU time of the busiest task of the page's main thread meanwhile, whatever it did, from a trace.
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
from rallypoint.bench.crew import Crew, Do, What
from rallypoint.bench.driver import be_nodes
from rallypoint.bench.helper import allow_many_files, end_all, fork
from rallypoint.bench.rallypoint_side import HOST, run_url, serve
from rallypoint.bench.sides import Sizes

FIRST_VIEW_S, UPDATE_MS = 2.0, 100.0
LIMIT_S = 120.0
DRIVERS = 4
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
def nodes_in_a_round(count: int) -> Iterator[tuple[Crew, str]]:
    """A server with a page, and nodes that are in their first round; the address of the page."""
    page = f"{HOST}:{free_port()}"
    server, port = serve("--http", page)
    try:
        sizes = Sizes(RUN, max(1, count * 8 // 10), count, join_timeout_s=int(LIMIT_S))
        hosted = [tuple(range(first, count, DRIVERS)) for first in range(DRIVERS)]
        url = run_url(port, sizes) + "&labels=zone%3Da%2Brack%3D7"
        with Crew(hosted, lambda number: fork(lambda sock: be_nodes(sock, hosted[number], url))) as crew:
            crew.wait(What.READY, crew.nodes, time.monotonic() + LIMIT_S)
            crew.tell(Do.JOIN, crew.nodes)
            crew.gather(crew.nodes, time.monotonic() + LIMIT_S)
            yield crew, f"http://{page}/?run={RUN}"
    finally:
        end_all([server])


def look(browser: Any, address: str, count: int) -> Any:
    """A page that shows all nodes."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script(f"window.nodes = {count};{PROBE}")
    page.goto(address)
    until(page, "window.probe.whole !== null")
    return page


def until(page: Any, condition: str) -> None:
    """Asked from outside: the page's own policy forbids to evaluate text inside it."""
    deadline = time.monotonic() + LIMIT_S
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {condition}")
        page.wait_for_timeout(50)


def number(tile: str) -> str:
    """What a tile says, as JavaScript."""
    return f"Number(document.querySelector('.tile[data-state=\"{tile}\"] .number').textContent.replace(',', ''))"


def busiest_task_ms(trace: Any) -> float:
    """The most CPU time of one task of a page's main thread."""
    named = [one for one in trace["traceEvents"] if one["name"] == "thread_name"]
    mains = {(one["pid"], one["tid"]) for one in named if one["args"]["name"] == "CrRendererMain"}
    tasks = [one for one in trace["traceEvents"] if "tdur" in one and (one["pid"], one["tid"]) in mains]
    return max(one["tdur"] for one in tasks) / 1000


def measure(count: int, repetitions: int, chromium: str, shots: Path | None) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    with nodes_in_a_round(count) as (crew, address), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        first = []
        for _ in range(repetitions):
            page = look(browser, address, count)
            first.append(page.evaluate("window.probe.whole") / 1000)
            page.context.close()
        page = look(browser, address, count)
        page.evaluate("window.probe.updates.length = 0")
        browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
        crew.kill(count // 2)
        until(page, f"{number('lost')} === 1")
        lost = [count // 2, *range(3, count - 1, 20)]
        for node in lost[1:]:
            crew.kill(node)
        until(page, f"{number('lost')} >= {len(set(lost))}")
        if shots is not None:
            page.wait_for_timeout(1500)
            page.screenshot(path=shots / "many-lost.png", full_page=True)
        left = [node for node in crew.nodes if node not in set(lost)]
        crew.tell(Do.FOLLOW, left)
        crew.gather(left, time.monotonic() + LIMIT_S)
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
    allow_many_files()
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
