"""The Python code of the README runs unchanged."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_has_python_to_run():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_python_of_the_readme_runs_without_error(block):
    done = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_demo_prints_its_output_and_ends():
    demo = README.parent / "examples" / "demo.py"
    done = subprocess.run([sys.executable, "-W", "error", demo], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    chapters = [line for line in done.stdout.splitlines() if "===" in line]
    for words in ("the job runs", "without the lost node", "with the new node", "exit codes [0, 0, 0, 0]", "done"):
        assert any(words in chapter for chapter in chapters), words
    assert "watch    " in done.stdout, "the live view, in lines"
