"""How live rounds go, for a terminal: what `tfpfl watch` prints of the state that a server tells its operator."""

import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.filesize import decimal
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tfpfl.checks import one_line
from tfpfl.live.watching import STATES
from tfpfl.studies.fitted_table import FittedTable

_STYLES = {"late": "bold yellow", "sent": "green", "revoked": "red", "away": "dim", "not joined": "dim"}
_EVENTS = {
    "joined": "joined",
    "revoked": "was revoked",
    "opened": "began",
    "arrived": "sent its update",
    "extended": "has a later deadline: too few came",
    "closed": "has what it waited for",
    "scored": "sent its scores",
    "ended": "is saved",
    "stepped": "is saved",
}
_BARS = "▁▂▃▄▅▆▇█"
_OTHER_LINES = 19  # of a screen, besides the rows of clients


class WatchTable:
    """A state as rich prints it.

    Args:
        state: from `WatchedServer.state`.
        lines: the height of the screen, which leaves clients out that need no look; None: all are shown.
        note: a sentence on top, such as that the server is away.
    """

    def __init__(self, state: dict, lines: int | None = None, note: str = ""):
        self.state, self.lines, self.note = state, lines, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, plain = self.state, options.ascii_only or not _can_show(options.encoding)
        if self.note:
            yield Text(self.note, style="bold yellow")
        yield self._head()
        yield self._round()
        yield self._curves(plain)
        yield self._clients()
        for event in state["events"][-5:]:
            yield Text(told(event), style="dim")

    def _head(self) -> Group:
        about, saved = self.state["run"], self.state["saved"]
        counts = self.state["counts"]
        here = sum(counts.get(name, 0) for name in ("late", "working", "sent", "here"))
        words = f"[bold]{escape(one_line(about['name'], 40))}[/]: {saved} of {about['rounds']} rounds are saved"
        sent = self.state["bytes"]
        line = f"{here} of {about['clients']} clients are here, {counts.get('late', 0)} late"
        bytes_ = f"{decimal(sent['down'])} to devices, {decimal(sent['up'])} from them"
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(total=max(about["rounds"], 1), completed=saved, width=30), Text.from_markup(words))
        return Group(grid, Text(f"{line}; {bytes_}"))

    def _round(self) -> Text:
        state, opened = self.state, self.state["round"]
        if state["doing"] == "done":
            return Text("The run is over.", style="green")
        if opened is None:
            about = state["run"]
            joined = about["clients"] - state["counts"].get("not joined", 0) - state["counts"].get("revoked", 0)
            few = f": {joined} of the {about['wait_for']} clients that it needs have joined"
            return Text(f"Round {state['saved'] + 1} waits for clients" + (few if joined < about["wait_for"] else ""))
        if opened["deadline"] is None and state["doing"] == "score":
            return Text(f"Round {opened['number']} is saved; devices score its theta")
        if opened["deadline"] is None:
            return Text(f"Round {opened['number']}: devices send updates at their own speed")
        left = max(opened["deadline"] - state["at"], 0)
        what = f"{len(opened['came'])} of {len(opened['invited'])} updates have come"
        if phase := opened.get("phase"):
            what = f"secure, phase {phase}: {len(opened['waiting'])} clients are missing"
        if state["doing"] == "score":
            what += f"; scores of {len(opened['waiting'])} clients are missing"
        moved = "; the deadline was moved, too few had come" if opened["moved"] else ""
        return Text(f"Round {opened['number']}: {what}, {left:.0f} s are left{moved}")

    def _curves(self, plain: bool) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        about, rows = self.state["run"]["score"], self.state["history"]
        times, unit = _scale(self.state)
        for model, title in models(rows):
            found = [r["scores"][model].get("score") for r in rows if model in r["scores"]]
            name = f"{about['name']}, {title}"
            table.add_row(name, *_curve([times * v for v in found if v is not None], unit, plain))
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        table.add_row("loss", *_curve(losses, "", plain))
        return table

    def _clients(self) -> Group:
        members, (times, unit) = self.state["members"], _scale(self.state)
        room = len(members) if self.lines is None else max(self.lines - _OTHER_LINES, 3)
        table = FittedTable(title_justify="left")
        table.add_columns("client", "state")
        table.add_columns("heard of", "came", self.state["run"]["score"]["name"], justify="right")
        for row in members[:room]:
            style = _STYLES.get(row["state"])
            state = f"[{style}]{row['state']}[/]" if style else row["state"]
            score = "-" if row["score"] is None else _number(times * row["score"], unit)
            heard = "-" if row["heard"] is None else f"{ago(row['heard'])} ago"
            came = f"{row['came']} of {row['invited']}" if row["invited"] else "-"
            table.add_row(_name(row), state, heard, came, score)
        left_off = self.state["left_off"] + max(len(members) - room, 0)
        counts = ", ".join(f"{n} {s}" for s in STATES if (n := self.state["counts"].get(s, 0)))
        return Group(table, Text(f"{counts}" + (f"; {left_off} clients are not shown" if left_off else ""), "dim"))


def models(rows: Sequence[dict]) -> list[tuple[str, str]]:
    """(name, title) of the models that were scored, the one that clients predict with first, as the server has them."""
    found, own = dict.fromkeys(model for row in rows for model in row["scores"]), "local copy"
    after = [(own, "after own work")] if own in found else []
    return [*zip([m for m in found if m != own], ("all clients", "shared model"), strict=False), *after]


def told(event: dict) -> str:
    """An event as a sentence."""
    when = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    who = f"round {event['round']}" if event["client"] is None else f"client {event['client']}"
    of = f" of round {event['round']}" if event["client"] is not None and event["round"] is not None else ""
    return f"{when}  {who} {_EVENTS.get(event['what'], event['what'])}{of}"


def ago(seconds: float) -> str:
    """A time that has passed, such as '12 s', '3 min', '5 h' or '2 d'."""
    for most, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def _scale(state: dict) -> tuple[int, str]:
    """With what scores are multiplied, and the unit behind them."""
    return (100, " %") if state["run"]["score"]["fraction"] else (1, "")


def _name(row: dict) -> str:
    number = str(row["client"])
    return number if row["name"] == number else f"{number} ({escape(one_line(row['name'], 30))})"


def _curve(values: Sequence[float], unit: str, plain: bool) -> tuple[str, str]:
    """A row of small bars, each the mean of some rounds, and the first and the last value."""
    if not values:
        return "", "none yet"
    parts = min(len(values), 24)  # so that a row has room in 80 columns
    means = [_mean(values[k * len(values) // parts : (k + 1) * len(values) // parts]) for k in range(parts)]
    low, high = min(means), max(means)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    bars = "" if plain else "".join(_BARS[round((m - low) / step)] for m in means)
    return bars, f"{_number(values[0], unit)} -> {_number(values[-1], unit)}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float, unit: str) -> str:
    return f"{value:.1f}{unit}" if unit else f"{value:.4g}"


def _can_show(encoding: str) -> bool:
    try:
        return bool(_BARS.encode(encoding))
    except (LookupError, UnicodeError):
        return False
