"""`rallypoint.alive()`: what arrives at the launcher, and that it never disturbs the program."""

import asyncio
import os
import subprocess
import sys

import pytest

import rallypoint
from rallypoint.launcher.stacks import FILE, Target, write_stacks
from rallypoint.launcher.stall import StallWatch
from rallypoint.launcher.worker_signs import WorkerSigns
from tests.patience import PATIENCE_S


def test_outside_a_launcher_it_does_nothing(monkeypatch):
    monkeypatch.delenv("RALLYPOINT_ALIVE", raising=False)
    code = "import sys, rallypoint; rallypoint.alive(1, 'x'); print('torch' in sys.modules, 'asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout == "False False\n"


def test_argument_of_the_wrong_type_is_an_error_of_the_program():
    with pytest.raises(ValueError, match="invalid literal"):
        rallypoint.alive("no number")  # type: ignore[arg-type]


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.01)


async def worker(signs: WorkerSigns, code: str) -> asyncio.subprocess.Process:
    env = {**os.environ, "LOCAL_RANK": "0", **signs.environment()}
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=env, stdin=asyncio.subprocess.PIPE)


CALLS = "import rallypoint, sys\nfor step in range(1, 101): rallypoint.alive(step, 'x' * 300)\nsys.stdin.read()"
TORCH = """
import os, sys
from torch.distributed.elastic.timer import FileTimerClient
client = FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
client.acquire("held", 10**10)
client.acquire("done", 10**10)
client.release("done")
sys.stdin.read()
"""


def test_last_step_arrives_and_the_stacks_of_the_process_can_be_asked_for(tmp_path):
    async def main() -> str:
        watch = StallWatch(0, 1, 10.0)
        signs = WorkerSigns(tmp_path, watch, lambda pid: None)
        process = await worker(signs, CALLS)
        try:
            await until(lambda: watch.states(0.0)[0].step == 100)
            assert watch.states(0.0)[0].note == "x" * 200
            assert signs.pids == {0: [process.pid]}
            await write_stacks([Target(0, 0, (process.pid,))], signs.directory, tmp_path, "a test")
        finally:
            process.kill()
            await process.wait()
            signs.close()
        return (tmp_path / "0" / FILE).read_text()

    text = asyncio.run(main())
    assert "=== rank 0: a test" in text
    assert 'File "<string>", line 3 in <module>' in text or "<module> (<string>:3)" in text, "faulthandler, or py-spy"


@pytest.mark.parametrize("within_s", ["1e300", "float('inf')"])
def test_call_that_allows_any_time_until_the_next_arrives(tmp_path, within_s):
    async def main() -> bool:
        watch = StallWatch(0, 1, 10.0)
        signs = WorkerSigns(tmp_path, watch, lambda pid: None)
        process = await worker(
            signs, f"import rallypoint, sys\nrallypoint.alive(1, within_s={within_s})\nsys.stdin.read()"
        )
        try:
            await until(lambda: signs.pids)
            return watch.look(asyncio.get_running_loop().time() + 1000.0, 1000.0)
        finally:
            process.kill()
            await process.wait()
            signs.close()

    assert not asyncio.run(main())


def test_process_without_a_handler_gets_no_signal_and_the_file_says_why(tmp_path):
    async def main() -> str:
        process = await asyncio.create_subprocess_exec("sleep", "300")
        try:
            await write_stacks([Target(0, 0, (process.pid,))], tmp_path, tmp_path, "a test")
            assert process.returncode is None
        finally:
            process.kill()
            await process.wait()
        return (tmp_path / "0" / FILE).read_text()

    text = asyncio.run(main())
    assert "no Python stack: py-spy" in text
    assert "; the process has not called rallypoint.alive()" in text
    assert "(sleep): state " in text


def test_timers_of_torch_arrive_by_the_same_pipe(tmp_path):
    pytest.importorskip("torch")

    async def main() -> None:
        watch = StallWatch(0, 1, 10.0)
        signs = WorkerSigns(tmp_path, watch, lambda pid: 0)
        process = await worker(signs, TORCH)
        try:
            await until(lambda: len(watch.timers(0)) == 1)
            assert watch.timers(0)[0].endswith(" held")
        finally:
            process.kill()
            await process.wait()
            signs.close()

    asyncio.run(main())


def test_reading_after_the_end_of_the_round_is_harmless(tmp_path):
    async def main() -> None:
        signs = WorkerSigns(tmp_path, StallWatch(0, 1, 10.0), lambda pid: None)
        signs.close()
        signs.read()
        signs.close()

    asyncio.run(main())
