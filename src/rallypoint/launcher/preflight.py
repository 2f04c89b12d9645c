"""A check of this machine before its node may join: `--preflight CMD`.

A node that fails it does not join. It is held back and tries again, and the reason is left in the run, where
`rallypoint status` and `rallypoint why` show it to everybody.
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
from rallypoint.launcher import guard
from rallypoint.launcher.output import Console
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings

NOTE_S = 5.0
"""What may be spent on leaving a note."""
LONGEST_REASON = 300
TAIL = 4096


async def check(command: str, env: Mapping[str, str], timeout_s: float) -> str | None:
    """Run the check; None: it passed, else what was wrong with it. Nothing of it is left afterwards."""
    with tempfile.TemporaryFile() as said:  # not a pipe: what it leaves in the background would keep that open
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            return f"preflight {command!r} did not end within {timeout_s:g} s"
        finally:
            await _clear_away(process)
        return None if code == 0 else _failure(command, code, said)


async def _clear_away(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    while left := guard.kill_below(os.getpid()):  # what went into a session of its own: this is a subreaper
        guard.reap_all(left)
        await asyncio.sleep(guard.LOOK_AGAIN_S)


def _failure(command: str, code: int, said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - TAIL))
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    ending = f"exited with {code}" if code >= 0 else f"was killed by signal {-code}"
    last = f": {lines[-1].strip()[:LONGEST_REASON]}" if lines else ""
    return f"preflight {command!r} {ending}{last}"


async def wait_until_fit(
    command: str, settings: Settings, name: str, env: Mapping[str, str], timeout_s: float, console: Console
) -> str | None:
    """Until the check passes (None), or the join time-out is over: then why it did not."""
    deadline = asyncio.get_running_loop().time() + settings.join_timeout_s
    pause_s = settings.hold_back_s
    while (why := await check(command, env, timeout_s)) is not None:
        left_s = deadline - asyncio.get_running_loop().time()
        await leave_note(settings, name, why)
        if left_s <= pause_s:
            return why
        console.say(f"this node is held back: {why}. It is tried again in {pause_s:g} s")
        console.wait_for(f"the preflight of this node: {why}")
        await asyncio.sleep(pause_s)
        pause_s = max(1.0, pause_s * 2)
    console.wait_for(None)
    return None


async def leave_note(settings: Settings, name: str, why: str) -> None:
    """Tell whoever asks why this node is missing; as far as the backend can be reached: the node's own log has it."""
    quiet = settings if settings.scheme != "tcp" else msgspec.structs.replace(settings, is_host=False)
    with suppress(BackendError, RendezvousError, TimeoutError):
        async with asyncio.timeout(NOTE_S):
            backend = await backend_opener(settings.scheme)(quiet)
            try:
                keys = RunKeys(settings.etcd_prefix, settings.run_id)
                await RunConfig(
                    backend, keys, settings, name, lambda: os.urandom(8).hex(), time.time
                ).note_failed_preflight(why)
            finally:
                await backend.close()
