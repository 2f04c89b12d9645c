"""All checks of a URL. If an early check fails, later ones that depend on it are skipped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

from rallypoint.backends.contract import Backend
from rallypoint.backends.schemes import observer_opener
from rallypoint.errors import RallypointError, Rejected, SettingsError
from rallypoint.observe.doctor import etcd, tcp
from rallypoint.observe.doctor.checks import Check, checks_of, failed, ok, skipped, warning
from rallypoint.observe.doctor.launcher import check_launcher
from rallypoint.observe.explain import FIX_PREFLIGHT, SAME_SETTINGS, is_present, mismatch_sentence, refusal_sentence
from rallypoint.observe.follower import read_report
from rallypoint.observe.report import Report
from rallypoint.observe.target import Target, open_backend, read_target

ROUND_TRIPS = 5
SLOW_S = 0.25
SPARE_FILES = 100
"""Open files that a server needs besides its connections."""

etcd.register()
tcp.register()
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


async def diagnose(url: str, limit_s: float, options: Mapping[str, object] = NO_OPTIONS) -> AsyncIterator[Check]:
    """Run the checks and yield each result at once. One step takes no longer than `limit_s`.

    `options` override those of the URL.
    """
    try:
        target = read_target(url, **{**options, "read_timeout": limit_s})
        observer_opener(target.settings.scheme)
    except SettingsError as error:
        yield failed("url", str(error), "correct the URL")
        return
    yield ok("url", f"run {target.settings.run_id!r} on {target.where}")
    all_passed = True
    backend_checks = checks_of(target.settings.scheme)
    if backend_checks is not None:
        async for check in backend_checks(target.settings, limit_s):
            yield check
            all_passed = all_passed and not check.is_bad
    report: Report | None = None
    if not all_passed:
        yield skipped("run", "the checks before this one have to pass first")
    else:
        try:
            async with asyncio.timeout(4 * limit_s), open_backend(target, limit_s) as backend:
                yield await _check_backend(backend, target.keys.config)
                report = await read_report(backend, target.keys, target.where)
        except TimeoutError:
            yield failed(
                "backend", f"no answer within {4 * limit_s:g} s", "check the server: it is paused or overloaded"
            )
        except Rejected as error:
            yield failed("backend", str(error), "the backend refused: correct in the URL what the message names")
        except RallypointError as error:
            yield failed("backend", str(error), "see the checks above")
    if report is not None:
        for check in _check_run(target, report):
            yield check
    yield _check_files(report)
    yield check_launcher()


async def _check_backend(backend: Backend, key: str) -> Check:
    """Make a few requests through the backend contract, as nodes do."""
    loop = asyncio.get_running_loop()
    took = []
    status = await backend.status()
    for _ in range(ROUND_TRIPS):
        started_at = loop.time()
        await backend.get(key)
        took.append(loop.time() - started_at)
    shown = [f"{name} {status.details[name]}" for name in ("runs", "connections", "members") if name in status.details]
    found = f"{status.backend}: {min(took) * 1000:.2f} to {max(took) * 1000:.2f} ms a request"
    if shown:
        found += f"; {', '.join(shown)}"
    if min(took) > SLOW_S:
        return warning("backend", found, "requests are slow: check the network and the load of the server")
    return ok("backend", found)


def _check_run(target: Target, report: Report) -> list[Check]:
    if not report.exists or report.config is None:
        why = "there is no such run yet: the first node creates it"
        return [
            warning(
                "run",
                why,
                f"if nodes should be there, check with `rallypoint ls {target.where}` whether they use another id",
            )
        ]
    checks = [ok("run", f"{report.phase.value}: {report.reason or 'no reason was given yet'}")]
    if report.unreadable:
        checks += [
            failed("records", why, "remove the key, or use another run id") for why in report.unreadable.values()
        ]
    now = time.time()
    present = [one for one in report.refused if is_present(one, now)]
    if mismatch := mismatch_sentence(report, target.given):
        checks.append(failed("settings", mismatch, SAME_SETTINGS))
    elif refused := [one for one in present if one.differences]:
        checks.append(failed("settings", "; ".join(refusal_sentence(one, now) for one in refused), SAME_SETTINGS))
    elif target.given:
        checks.append(ok("settings", "the settings in the URL are those of the run, and no node was refused"))
    else:
        checks.append(ok("settings", "no node was refused (give a node's whole URL to compare its settings)"))
    if failed_preflight := [one for one in present if not one.differences]:
        checks.append(
            warning("preflight", "; ".join(refusal_sentence(one, now) for one in failed_preflight), FIX_PREFLIGHT)
        )
    return checks


def _check_files(report: Report | None) -> Check:
    """Whether the limit on open files of this machine allows to serve a run of this size."""
    try:
        import resource
    except ImportError:
        return skipped("open files", "this system has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (report.shared("max_nodes") if report is not None else 0) + SPARE_FILES
    found = f"this shell allows {soft} (up to {hard} if raised)"
    if soft < needed:
        fix = f"raise it (`ulimit -n {needed}`) where the server runs: it needs one for each node, and some more"
        return warning("open files", f"{found}, and a server of this run may need {needed}", fix)
    return ok("open files", found)
