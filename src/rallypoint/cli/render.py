"""Renders reports as text: tables that fit the window on a terminal, plain text without one.

It imports rich, which is slow: commands import this module only when they print something.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rallypoint.observe.doctor.checks import Check, Verdict
from rallypoint.observe.explain import end_sentence, explain, is_present, restarts_sentence
from rallypoint.observe.listing import RunSummary
from rallypoint.observe.phase import Phase, Tone
from rallypoint.observe.report import NodeReport, PastRound, Report, RoundReport, Standing
from rallypoint.sentences import duration

PIPED_WIDTH = 10_000
"""Output to a pipe or a file is neither cut nor wrapped."""
STYLES = {
    Standing.MEMBER: "green",
    Standing.CONFIRMED: "green",
    Standing.CONFIRMING: "yellow",
    Standing.WAITING: "yellow",
    Standing.HELD_BACK: "red",
    Standing.GONE: "red",
    Standing.DRAINED: "magenta",
}
TONES = {Tone.GOOD: "green", Tone.LOOK: "yellow", Tone.BAD: "bold red", Tone.NONE: "dim"}
VERDICTS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red", Verdict.SKIPPED: "dim"}
NARROW, MEDIUM = 60, 100
LOW = 20
"""In a window with fewer lines than this, sentences are cut to leave room for nodes."""


def console() -> Console:
    """A console for stdout: as wide as the window on a terminal, else of PIPED_WIDTH."""
    found = Console(highlight=False, emoji=False)
    return found if found.is_terminal else Console(width=PIPED_WIDTH, highlight=False, emoji=False)


def wall_clock() -> float:
    """Seconds since 1970. Only for times that are shown to people."""
    return time.time()


def ago(at: float | None) -> str:
    """How long ago that was. For people only: the time is from another machine's clock."""
    if at is None:
        return "-"
    age_s = wall_clock() - at
    return f"{span(age_s)} ago" if age_s > -2 else "its clock is ahead"


def span(seconds: float | None) -> str:
    """A duration in at most two units."""
    return "-" if seconds is None else duration(seconds)


def moment(at: float | None) -> str:
    """A wall-clock time in this machine's time zone; with the date unless it is today."""
    if not at:
        return "-"
    when = datetime.datetime.fromtimestamp(at, tz=datetime.UTC).astimezone()
    is_today = when.date() == datetime.datetime.fromtimestamp(wall_clock(), tz=datetime.UTC).astimezone().date()
    return when.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")


def _table(is_terminal: bool) -> Table:
    return Table(box=box.SIMPLE_HEAD if is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)


# --- a run ------------------------------------------------------------------------------------------------------------


def heading(report: Report) -> list[Text]:
    """A summary of the run, one line each for its state, reason, sizes and nodes, and for each trouble."""
    lines = [Text.assemble((f"run {report.run_id}", "bold"), f" on {report.where}")]
    if not report.exists:
        return [*lines, Text("there is no such run")]
    state = Text.assemble("state: ", phase_text(report.phase))
    if report.round is not None:
        state.append(f", {_round(report.round)}")
    lines.append(state)
    if report.reason and not report.is_closed:  # the line on its closing has the reason
        lines.append(Text(f"reason: {report.reason}"))
    shared = report.config.shared if report.config is not None else {}
    sizes = f"{shared.get('min_nodes', '?')} to {shared.get('max_nodes', '?')} nodes"
    if shared.get("step", 1) != 1:
        sizes += f" in steps of {shared['step']}"
    by = report.config.started_by if report.config is not None else ""
    coordinator = report.coordinator.name if report.coordinator is not None else "none"
    lines.append(Text(f"sizes: {sizes}; coordinator: {coordinator}; started by {by or '?'}"))
    lines.append(Text(f"nodes: {counts_sentence(report)}"))
    if report.restarts is not None:
        why = f": {report.restarts.why}" if report.restarts.used and report.restarts.why else ""
        lines.append(Text(f"restarts: {restarts_sentence(report.restarts)}{why}"))
    if report.last_end is not None and report.last_end.ended not in report.reason:
        lines.append(Text(f"last round: {end_sentence(report.last_end)}"))
    lines += [
        Text(f"held back for {held.hold_s:g} s: {held.name} ({held.why})", style="red")
        for held in report.held
        if held.is_held
    ]
    lines += [
        Text(
            f"{'refused' if one.differences else 'did not join'}: {one.name} ({moment(one.refused_at)}, "
            f"{ago(one.refused_at)}): {one.why}",
            style="red" if is_present(one, wall_clock()) else "dim",
        )
        for one in report.refused
    ]
    if report.closing is not None:
        word = "closed" if report.closing.is_closed else "reopened"
        closing = report.closing
        lines.append(
            Text(f"{word} by {closing.by} at {moment(closing.changed_at)}: {closing.why or 'no reason given'}")
        )
    return lines


def phase_text(phase: Phase) -> Text:
    """The phase in its colour."""
    return Text(phase.value, style=TONES[phase.tone])


def _round(one: RoundReport) -> str:
    """The current round or attempt, as a part of a sentence."""
    if one.phase == "forming":
        return f"round {one.number} with {one.present} of {one.size} confirmed"
    if one.phase == "over":
        return f"round {one.number} is over"
    if one.phase == "given up":
        return f"round {one.number} was given up"
    since = "" if one.active_at is None else f", since {moment(one.active_at)} ({ago(one.active_at)})"
    return f"round {one.number} with {one.present} of {one.size} members{since}"


def counts_sentence(report: Report) -> str:
    """The number of nodes with each standing, without zeros."""
    counts = report.counts
    words = {
        "member" if counts.member == 1 else "members": counts.member,
        "confirmed": counts.confirmed,
        "confirming": counts.confirming,
        "joining": counts.joining,
        "waiting": counts.waiting,
        "spare" if counts.spare == 1 else "spares": counts.spare,
        "held back": counts.held_back,
        "drained": counts.drained,
        "gone": counts.gone,
    }
    parts = [f"{count} {word}" for word, count in words.items() if count]
    return ", ".join(parts) or "none"


def nodes_table(nodes: Sequence[NodeReport], width: int, is_terminal: bool) -> Table:
    """One line for each node. A narrow window has fewer columns."""
    table = _table(is_terminal)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("node", no_wrap=True, overflow="ellipsis")
    table.add_column("standing", no_wrap=True)
    is_wide, is_medium = width >= MEDIUM, width >= NARROW
    if is_medium:
        table.add_column("joined", no_wrap=True)
    if is_wide:
        table.add_column("address", no_wrap=True, overflow="ellipsis")
        table.add_column("pid", justify="right", no_wrap=True)
        table.add_column("labels", no_wrap=True, overflow="ellipsis")
        table.add_column("id", no_wrap=True, overflow="ellipsis")
    for node in nodes:
        standing = node.standing.value + (" (asked to go)" if node.drain is not None else "")
        row: list[str | Text] = [
            "" if node.rank is None else str(node.rank),
            Text(node.name),
            Text(standing, style=STYLES.get(node.standing, "")),
        ]
        if is_medium:
            row.append(ago(node.joined_at))
        if is_wide:
            labels = " ".join(f"{key}={value}" for key, value in sorted(node.labels.items()))
            row += [Text(node.addr), str(node.pid or "-"), Text(labels), Text(node.id)]
        table.add_row(*row)
    return table


def in_order(report: Report) -> list[NodeReport]:
    """The nodes: members by rank, then the others by standing and name."""
    return sorted(report.nodes, key=lambda node: (node.rank is None, node.rank or 0, node.standing.value, node.name))


def trouble_first(report: Report) -> list[NodeReport]:
    """The nodes, those with a problem first: a window may not show all of them."""
    order = [
        Standing.GONE,
        Standing.HELD_BACK,
        Standing.CONFIRMING,
        Standing.WAITING,
        Standing.JOINING,
        Standing.DRAINED,
        Standing.LEFT,
    ]
    rank = {standing: place for place, standing in enumerate(order)}
    return sorted(report.nodes, key=lambda node: (rank.get(node.standing, len(order)), node.rank or 0, node.name))


def status_view(report: Report, out: Console) -> RenderableType:
    """The output of `rallypoint status`."""
    lines: list[RenderableType] = [*heading(report)]
    if report.nodes:
        lines += ["", nodes_table(in_order(report), out.width, out.is_terminal)]
    return Group(*lines)


def screen(report: Report, trouble: str, out: Console) -> RenderableType:
    """The screen of `rallypoint watch`: as much as fits into the window."""
    lines = heading(report)
    if trouble:
        lines.insert(0, Text(f"cannot be reached at present: {trouble}", style="bold red"))
    if report.exists:
        lines += [Text(text, style="cyan") for text in explain(report, wall_clock()).advice]
    if out.height < LOW:
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
    head: list[RenderableType] = [*lines]
    used = sum(len(out.render_lines(line, pad=False)) for line in head) + 4
    room = max(1, out.height - used)
    nodes = trouble_first(report)
    shown = nodes if len(nodes) <= room else nodes[: max(0, room - 1)]
    if shown:
        head += ["", nodes_table(shown, out.width, is_terminal=True)]
    if len(shown) < len(nodes):
        head.append(Text(f"... and {len(nodes) - len(shown)} more", style="dim"))
    return Group(*head)


# --- runs, rounds, checks ---------------------------------------------------------------------------------------------


def runs_table(runs: Sequence[RunSummary], out: Console) -> Table:
    """The output of `rallypoint ls`."""
    table = _table(out.is_terminal)
    for name, justify in (
        ("run", "left"),
        ("state", "left"),
        ("round", "right"),
        ("nodes", "right"),
        ("sizes", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "run", overflow="fold")  # type: ignore[arg-type]
    if out.width >= NARROW:
        table.add_column("reason", overflow="ellipsis", no_wrap=True)
    for one in runs:
        row: list[str | Text] = [
            Text(one.run_id),
            phase_text(one.phase),
            str(one.round or "-"),
            str(one.nodes),
            f"{one.min_nodes}-{one.max_nodes}",
        ]
        table.add_row(*row, *([Text(one.reason)] if out.width >= NARROW else []))
    return table


def history_table(rounds: Sequence[PastRound], out: Console) -> Table:
    """The output of `rallypoint history`."""
    table = _table(out.is_terminal)
    is_wide = out.width >= MEDIUM
    heads = ["round", "active since", "size", "gathered in", "last call", "confirmed in", "lasted"]
    for name in heads if is_wide else [heads[0], heads[1], heads[2], heads[6]]:
        table.add_column(name, justify="right" if name in ("round", "size") else "left", no_wrap=True)
    table.add_column("last to arrive", overflow="fold")
    table.add_column("why it ended", overflow="fold")
    for one in rounds:
        last = f"{one.last_arrivals[-1][0]} (+{one.last_arrivals[-1][1]:.1f} s)" if one.last_arrivals else "-"
        ended = one.ended or "not over"
        lasted = span(one.lasted_s) if one.ended else "-"
        spans = [span(one.gather_s), span(one.last_call_s), span(one.confirm_s)] if is_wide else []
        row = [str(one.number), f"{moment(one.active_at)} ({ago(one.active_at)})", str(one.size), *spans, lasted]
        table.add_row(*row, Text(last), Text(ended))
    return table


def check_line(check: Check) -> Text:
    """The output of `rallypoint doctor` for one check."""
    line = Text.assemble(
        (f"{check.verdict.value:8}", VERDICTS[check.verdict]), (f"{check.name}: ", "bold"), check.found
    )
    if check.fix:
        line.append(f"\n{'':8}what to do: {check.fix}")
    return line
