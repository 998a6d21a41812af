"""The live display of several pipelines on shared workers: a line for each of either, in columns.

    pipeline            step   reward         tokens/s  share     left
    sums      ━━━━━━     3/6    0.250 ▁▂▃▄         412   100%     0:02
    calc      ━━         1/6   0.0312            1,033   waiting  0:12

    worker 0  87% busy  sums: grad
    worker 1  93% busy  sums: grad 50%, calc: decode 50%

Drawn several times a second beside what it shows: plain lines of text, which cost a tenth of a table.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from jigsawrl.telemetry.text import clock, number, sparkline
from jigsawrl.telemetry.track import Track

_MAX_NAME = 24
_SPARKLINE = 8
_MOST_WORKERS = 16
_BAR, _SHORT_BAR = 16, 4
_GAP = 2
_BAD = ("failed", "recovering")


@dataclass(frozen=True, slots=True)
class PipelineLine:
    """Where a pipeline stands now. `share` is the part of all workers that it has; `state` says why it has none, or
    what is unusual, and is empty where it just runs."""

    name: str
    share: float = 0.0
    state: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A sub-stage on a worker."""

    pipeline: str
    substage: str
    share: float = 1.0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """What runs on a worker now, and the fraction of the run so far in which something did."""

    worker: int
    runs: tuple[Piece, ...]
    busy: float


def board(
    tracks: Mapping[str, Track],
    pipelines: Sequence[PipelineLine],
    workers: Sequence[WorkerLine],
    now: float,
    width: int,
    plain: bool,
) -> Iterator[Text]:
    """A pipeline without a track has not begun."""
    names = [line.name for line in pipelines] + [f"worker {line.worker}" for line in workers]
    first = min(_MAX_NAME, max(map(cell_len, [*names, "pipeline"])))
    steps = max(5, *(2 * len(str(track.total)) + 1 for track in tracks.values())) if tracks else 5
    columns = _Columns(first, steps, width, plain)
    yield columns.heads()
    for line in pipelines:
        yield columns.pipeline(line, tracks.get(line.name), now)
    yield Text()
    shown = workers if len(workers) <= _MOST_WORKERS else workers[: _MOST_WORKERS - 1]
    for worker in shown:
        yield columns.worker(worker)
    if rest := workers[len(shown) :]:
        busy = math.fsum(worker.busy for worker in rest) / len(rest)
        last = Text(columns.name(f"{len(rest)} more"), no_wrap=True, overflow="crop")
        yield last.append(f"{busy:4.0%} busy", style="dim")


class _Columns:
    """What fits: first the bar gets shorter, then it goes, then the course of the reward."""

    def __init__(self, name: int, steps: int, width: int, plain: bool) -> None:
        self.width, self.plain = width, plain
        self.widths = {"name": name, "step": steps, "reward": 7, "tokens/s": 8, "share": 10, "left": 7}
        free = width - sum(self.widths.values()) - _GAP * (len(self.widths) - 1)
        self.spark = 0 if plain or free < _SPARKLINE + 1 else _SPARKLINE + 1
        free -= self.spark + _GAP
        self.bar = max(0, min(_BAR, free)) if free >= _SHORT_BAR else 0

    def name(self, name: str) -> str:
        long, width = cell_len(name) > self.widths["name"], self.widths["name"]
        cut = set_cell_size(name, width - 1) + "…" if long and not self.plain else set_cell_size(name, width)
        return cut + " " * _GAP

    def heads(self) -> Text:
        line = Text(self.name("pipeline"), style="dim", no_wrap=True, overflow="crop")
        line.append(" " * (self.bar + _GAP if self.bar else 0))
        line.append("step".rjust(self.widths["step"]) + " " * _GAP)
        line.append("reward".rjust(self.widths["reward"]) + " " * (self.spark + _GAP))
        line.append("tokens/s".rjust(self.widths["tokens/s"]) + " " * _GAP)
        return self._cut(line.append("share".ljust(self.widths["share"]) + " " * _GAP).append("   left"))

    def pipeline(self, line: PipelineLine, track: Track | None, now: float) -> Text:
        text = Text(no_wrap=True, overflow="crop")
        text.append(self.name(line.name), style="bold")
        if self.bar:
            text.append_text(self._bar(track)).append(" " * _GAP)
        steps = f"{track.step}/{track.total}" if track else ""
        text.append(steps.rjust(self.widths["step"]) + " " * _GAP)
        text.append_text(self._reward(track)).append(" " * _GAP)
        rate = number(track.figures["tokens/s"]) if track and "tokens/s" in track.figures else ""
        text.append(rate.rjust(self.widths["tokens/s"]) + " " * _GAP)
        word, _, more = line.state.partition(": ")
        state = word or f"{line.share:.0%}"
        style = "red" if word in _BAD else "green" if word == "finished" else "dim" if word else ""
        if more:
            return self._cut(text.append(f"{word}: {more}", style=style))
        text.append(state.ljust(self.widths["share"]), style=style)
        return self._cut(text.append(" " * _GAP).append_text(self._left(track, word, now)))

    def worker(self, line: WorkerLine) -> Text:
        text = Text(self.name(f"worker {line.worker}"), no_wrap=True, overflow="crop")
        text.append(f"{line.busy:4.0%} busy  ", style="dim")
        if not line.runs:
            return text.append("idle", style="dim")
        alone = len(line.runs) == 1
        for place, piece in enumerate(line.runs):
            text.append(", " if place else "").append(piece.pipeline, style="bold").append(
                f": {piece.substage}"
            )
            if piece.paused:
                text.append(" paused", style="yellow")
            elif not alone or piece.share < 1:
                text.append(f" {piece.share:.0%}", style="dim")
        return self._cut(text)

    def _bar(self, track: Track | None) -> Text:
        part = track.step / max(track.total, 1) if track else 0.0
        done = min(self.bar, round(self.bar * part))
        full, rest = ("#", ".") if self.plain else ("━", "━")
        style = "green" if part >= 1 else "magenta"
        return Text.assemble((full * done, style), (rest * (self.bar - done), "bright_black"))

    def _reward(self, track: Track | None) -> Text:
        value = track.figures.get("reward") if track else None
        shown = "" if value is None else number(value)
        text = Text(shown.rjust(self.widths["reward"]))
        if value is not None and not math.isfinite(value):
            text.stylize("bold red")
        if self.spark:
            course = sparkline(track.rewards, _SPARKLINE) if track and len(track.rewards) > 1 else ""
            text.append(f" {course:<{_SPARKLINE}}", style="cyan")
        return text

    def _left(self, track: Track | None, word: str, now: float) -> Text:
        """Time left, or, once all steps are made, what they took."""
        width = self.widths["left"]
        if track is None or word in ("failed", "interrupted"):
            return Text("".rjust(width))
        if track.step >= track.total:
            return Text(clock(track.stamps[-1][1] - track.started).rjust(width), style="green")
        left = track.seconds_left(now)
        return Text(
            clock(now - track.started if left is None else left).rjust(width),
            style="dim" if left is None else "",
        )

    def _cut(self, line: Text) -> Text:
        line.rstrip()
        line.truncate(self.width)
        return line
