"""Code and commands in README and docs run as they stand there."""

from __future__ import annotations

import re
from dataclasses import replace

import click
import pytest

from rallypoint.cli import main
from tests.docs.blocks import KNOWN, ROOT, all_blocks, blocks_of, commands_of, pages
from tests.docs.stage import Stage, is_possible

BLOCKS = all_blocks()
PAGES = sorted({block.page for block in BLOCKS if block.is_run})


def test_every_block_says_what_it_is():
    """Else nobody knows whether it should run."""
    assert [block.name for block in BLOCKS if block.kind not in KNOWN] == []


def test_who_is_not_run_has_a_reason():
    unexplained = [block.name for block in BLOCKS if block.how.startswith("not") and len(block.how) < len("not, x y")]
    assert unexplained == []
    known = ("", "in the background", "with a job", "fails")
    assert [block.name for block in BLOCKS if block.how not in known and not block.how.startswith("not, ")] == []


def test_readme_has_code_and_commands_that_are_run():
    assert {block.kind for block in blocks_of(ROOT / "README.md") if block.is_run} >= {"python"}


def command_lines():
    """Every `rallypoint ...` that a page shows, run or not, and those in scripts and manifests of the examples."""
    for block in BLOCKS:
        if block.page == "docs/commands.md":
            continue
        for args in commands_of(block.script if block.kind == "console" else block.text):
            yield pytest.param(args, id=f"{block.name} {' '.join(args)[:40]}")
    for page in pages():
        if page.name == "commands.md":
            for line in page.read_text(encoding="utf-8").splitlines():
                shown = re.split(r"  +", line.removeprefix("Example: ").strip())[0]  # a remark may follow
                for args in commands_of(shown) if line.startswith(("Example: ", "  rallypoint ")) else ():
                    yield pytest.param(args, id=f"commands.md {' '.join(args)[:40]}")


@pytest.mark.parametrize("args", list(command_lines()))
def test_command_that_a_page_shows_is_understood(args):
    context = main.make_context("rallypoint", list(args))
    rest = [*context._protected_args, *context.args]
    while isinstance(context.command, click.Group) and rest:
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, list(rest), parent=context, resilient_parsing=_is_about_files(rest))
        rest = [*context._protected_args, *context.args]


def _is_about_files(args: list[str]) -> bool:
    """Files and directories of the page are not on this machine."""
    return any("/" in arg and not arg.startswith(("tcp://", "etcd://", "file://")) for arg in args)


@pytest.mark.skipif(not is_possible(), reason="a machine of its own for commands of the docs needs root and iproute2")
@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_in_their_order(page, tmp_path):
    with Stage(tmp_path) as stage:
        for block in in_order(blocks_of(ROOT / page)):
            if block.how == "with a job":
                stage.start_job()
            stage.perform(block)


def in_order(blocks):
    """Python that follows Python is one program: what a page defines, it uses further down."""
    found = []
    for block in blocks:
        if not block.is_run:
            continue
        if found and block.kind == found[-1].kind == "python":
            found[-1] = replace(found[-1], text=found[-1].text + "\n\n" + block.text)
        else:
            found.append(block)
    return found
