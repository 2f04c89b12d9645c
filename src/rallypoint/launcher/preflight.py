"""The preflight check of this machine before its node may join: `--preflight CMD`.

A node whose check fails does not join. It is held back and checked again later, and the reason is written to the run,
where `rallypoint status` and `rallypoint why` show it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

import msgspec

from rallypoint.backends.schemes import backend_opener
from rallypoint.errors import BackendError, RendezvousError
from rallypoint.launcher import worker_guardian
from rallypoint.launcher.console import Console, Limit
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings

NOTE_S = 5.0
"""The time limit for writing the reason to the run."""
MAX_REASON = 300
TAIL_BYTES = 4096


async def check(command: str, env: Mapping[str, str], timeout_s: float) -> str | None:
    """Run the command. Returns None if it succeeded, else the reason. No process of it is left afterwards."""
    with tempfile.TemporaryFile() as output:  # not a pipe, which a background process would keep open
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            return f"preflight {command!r} did not end within {timeout_s:g} s"
        finally:
            await _kill_all(process)
        return None if code == 0 else _failure(command, code, output)


async def _kill_all(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    # The launcher is a subreaper: processes that started a session of their own are its descendants, too.
    while left := worker_guardian.kill_below(os.getpid()):
        worker_guardian.reap_all(left)
        await asyncio.sleep(worker_guardian.KILL_AGAIN_S)


def _failure(command: str, code: int, output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    ending = f"exited with {code}" if code >= 0 else f"was killed by signal {-code}"
    last = f": {lines[-1].strip()[:MAX_REASON]}" if lines else ""
    return f"preflight {command!r} {ending}{last}"


async def wait_until_passed(
    command: str, settings: Settings, name: str, env: Mapping[str, str], timeout_s: float, console: Console
) -> str | None:
    """Repeat the check until it passes; then returns None. Returns the reason if the join time-out ends first."""
    deadline = asyncio.get_running_loop().time() + settings.join_timeout_s
    pause_s = settings.hold_back_s
    while True:
        console.wait_for(f"the preflight check {command!r}", Limit("--preflight-timeout", timeout_s))
        if (why := await check(command, env, timeout_s)) is None:
            break
        left_s = deadline - asyncio.get_running_loop().time()
        await write_note(settings, name, why)
        if left_s <= pause_s:
            return why
        console.say(f"this node is held back: {why}. The next check is in {pause_s:g} s")
        console.wait_for(
            f"the preflight check of this node to succeed: {why}", Limit("join_timeout", left_s, "this node gives up")
        )
        await asyncio.sleep(pause_s)
        pause_s = max(1.0, pause_s * 2)
    console.wait_for(None)
    return None


async def write_note(settings: Settings, name: str, why: str) -> None:
    """Write to the run why this node is missing. Errors are ignored: the node's own log has the reason, too."""
    not_hosting = settings if settings.scheme != "tcp" else msgspec.structs.replace(settings, is_host=False)
    with suppress(BackendError, RendezvousError, TimeoutError):
        async with asyncio.timeout(NOTE_S):
            backend = await backend_opener(settings.scheme)(not_hosting)
            try:
                keys = RunKeys(settings.etcd_prefix, settings.run_id)
                await RunConfig(
                    backend, keys, settings, name, lambda: os.urandom(8).hex(), time.time
                ).note_failed_preflight(why)
            finally:
                await backend.close()
