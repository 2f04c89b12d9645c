"""What is known of a failed worker: its record or its last words, in one sentence and a short block."""

import json
import subprocess
import sys

import pytest

from rallypoint.launcher.failure import MAX_LINES, MAX_MESSAGE, Evidence, Failure, describe, ended

TRACEBACK = b"""loading
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
  File "train.py", line 2, in step
    raise RuntimeError("CUDA out of memory")
RuntimeError: CUDA out of memory
"""


def failure(code: int | None = 1, recorded: bytes = b"", stderr: bytes = b"", **ages: float) -> Failure:
    found = describe(Evidence(3, 1, code, recorded=recorded, stderr=stderr, **ages), "b")
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exited with 1"),
        (139, "was killed by SIGSEGV"),
        (137, "was killed by SIGKILL, perhaps for want of memory"),
        (128 + 40, "was killed by signal 40"),
        (255, "exited with 255"),
    ],
)
def test_code_of_a_program_is_not_taken_for_a_signal_and_signals_have_names(code, words):
    assert ended(code) == words


def test_last_line_of_a_traceback_is_the_message():
    found = failure(stderr=TRACEBACK)
    assert found.sentence == "rank 3 on b exited with 1: RuntimeError: CUDA out of memory"
    assert found.trace[0] == "Traceback (most recent call last):"
    assert found.trace[-1] == "RuntimeError: CUDA out of memory"
    assert failure(stderr=TRACEBACK + b"a warning at exit\n").message == "RuntimeError: CUDA out of memory"


def test_traceback_with_the_tags_of_torch_is_recognised():
    tagged = b"".join(b"[rank3]: " + line + b"\n" for line in TRACEBACK.splitlines())
    assert failure(stderr=tagged).message == "RuntimeError: CUDA out of memory"


def test_record_of_torch_comes_before_stderr():
    torch_errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    assert torch_errors
    program = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise RuntimeError('CUDA out of memory\\nTried to allocate 2 GiB')\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TORCHELASTIC_ERROR_FILE": "/dev/stdout"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    found = failure(recorded=done.stdout, stderr=b"something else\n")
    assert found.message == "RuntimeError: CUDA out of memory"
    assert found.trace[0] == "Traceback (most recent call last):"
    assert found.trace[-1] == "Tried to allocate 2 GiB"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"message": {}}', b'{"message": {"extraInfo": 3}}', b"\xff\xfe", b"null"]
)
def test_file_that_is_no_record_is_ignored(content):
    assert failure(recorded=content, stderr=b"last line\n").message == "last line"


def test_record_with_a_plain_message_is_used():
    assert failure(recorded=b'{"message": "no disk"}').message == "no disk"


def test_process_that_was_killed_has_no_message_unless_it_says_why():
    found = failure(139, stderr=b"epoch 7\nepoch 8\n")
    assert (found.message, found.trace) == ("", ("epoch 7", "epoch 8"))
    fatal = b"epoch 7\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File x\nExtension modules: y\n"
    assert failure(139, stderr=fatal).message == "Segmentation fault"


def test_message_and_block_are_bounded():
    long = b"x" * 10_000 + b"\n"
    found = failure(stderr=TRACEBACK[:-1] + long, recorded=b"")
    assert len(found.message) == MAX_MESSAGE
    deep = b"Traceback (most recent call last):\n" + b"  File x\n" * 1000 + b"E: deep\n"
    found = failure(stderr=deep)
    assert (len(found.trace), found.trace[-1]) == (MAX_LINES, "E: deep")
    record = json.dumps({"message": {"message": "m", "extraInfo": {"py_callstack": "y" * 10**6}}}).encode()
    assert len(failure(recorded=record).trace[0]) < 1000


def test_worker_that_still_ends_has_failed_if_it_has_said_so():
    assert describe(Evidence(0, 0, None, stderr=b"working\n"), "a") is None
    assert describe(Evidence(0, 0, None, stderr=TRACEBACK, stderr_s=60.0), "a") is None, "an old one: it goes on"
    assert describe(Evidence(0, 0, None, stderr=TRACEBACK + b"retrying\n"), "a") is None
    assert describe(Evidence(0, 0, 0, stderr=TRACEBACK), "a") is None
    assert describe(Evidence(0, 0, None, stderr=TRACEBACK), "a") is None, "in a file: it may be old"
    assert failure(None, stderr=TRACEBACK, stderr_s=0.1).code == 1
    assert failure(None, recorded=b'{"message": "x"}').message == "x"


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4",
        "torch.distributed.DistBackendError: NCCL error in: ncclUtils.hpp:77, remote process exited",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError",
    ],
)
def test_failure_that_speaks_of_a_peer_may_be_an_echo(words):
    assert failure(stderr=words.encode()).may_be_echo
    assert not failure(137, stderr=words.encode()).may_be_echo, "nobody is killed by an echo"


@pytest.mark.parametrize("words", ["RuntimeError: CUDA out of memory", "KeyError: 'epoch'", "ValueError: NaN loss", ""])
def test_failure_that_speaks_of_itself_is_no_echo(words):
    assert not failure(stderr=words.encode()).may_be_echo
