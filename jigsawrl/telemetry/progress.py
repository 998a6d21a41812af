"""What a person sees while pipelines run.

On a terminal a bar for each pipeline with the figures that matter below it; elsewhere plain lines, at most about one
a second for each pipeline, the first and the last step always among them; with `json`, nothing on stdout.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jigsawrl.telemetry.text import clock, number, sparkline

_MAX_WIDTH = 100
_MAX_NAME = 24
_SPARKLINE = 8
_SECONDS_BETWEEN_LINES = 1.0


@dataclass(slots=True)
class _Track:
    """One pipeline's bar. `stamps` are the ends of its last steps, for the pace."""

    name: str
    total: int
    step: int
    started: float
    stamps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    figures: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    line_at: float = -math.inf

    def seconds_left(self, now: float) -> float | None:
        (first_step, first), (last_step, last) = self.stamps[0], self.stamps[-1]
        if last_step == first_step:
            return None
        pace = (last - first) / (last_step - first_step)
        return max(0.0, pace * (self.total - self.step) - (now - last))


class Shown(Protocol):
    """Whoever shows a pipeline's progress to people."""

    def start(self, name: str, total_steps: int, done: int = 0) -> None: ...

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...


class Progress:
    """The live display. As a context manager it gives the terminal back whatever happens inside."""

    def __init__(
        self,
        *,
        json: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if console is None:
            # A forced colour setting makes rich believe in a terminal; bars in a log file help nobody.
            interactive = None if sys.stdout.isatty() else False
            console = Console(stderr=json, highlight=False, force_interactive=interactive)
        self._console = console
        self._json = json
        self._now = now
        self._tracks: dict[str, _Track] = {}
        self._live: Live | None = None

    def start(self, name: str, total_steps: int, done: int = 0) -> None:
        """Adds a pipeline, of which `done` steps were made in earlier runs."""
        track = _Track(name, total_steps, done, self._now())
        track.stamps.append((done, track.started))
        self._tracks[name] = track
        if self._live is None and self._console.is_interactive and not self._json:
            self._live = Live(console=self._console, get_renderable=lambda: self, refresh_per_second=4)
            self._live.start()

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Shows that a step is done, with its metrics by their names in metrics.jsonl."""
        track, now = self._tracks[name], self._now()
        first = len(track.stamps) == 1
        track.step = step
        track.stamps.append((step, now))
        track.figures = _figures(values)
        if "reward" in track.figures:
            track.rewards.append(track.figures["reward"])
        if self._live is not None or self._json:
            return
        if first or step >= track.total or now - track.line_at >= _SECONDS_BETWEEN_LINES:
            track.line_at = now
            self.message(_plain_line(track, now))

    def message(self, text: str) -> None:
        """Prints above the bars; with `json`, on stderr."""
        self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        """Leaves the last state on the screen and gives the terminal back. Idempotent."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The display as it stands."""
        now, tracks = self._now(), list(self._tracks.values())
        width, plain = min(options.max_width, _MAX_WIDTH), options.ascii_only
        names = max(min(len(track.name), _MAX_NAME) for track in tracks)
        counts = max(2 * len(str(track.total)) + 1 for track in tracks)
        for track in tracks:
            bar = Table.grid(padding=(0, 1), expand=True)
            bar.width = width
            bar.add_column(width=names, no_wrap=True, overflow="crop" if plain else "ellipsis")
            bar.add_column(ratio=1)
            bar.add_column(width=counts, justify="right", no_wrap=True)
            bar.add_column(width=12, justify="right", no_wrap=True)
            bar.add_row(
                Text(track.name, style="bold"),
                ProgressBar(total=max(track.total, 1), completed=track.step, finished_style="green"),
                Text(f"{track.step}/{track.total}"),
                _times(track, now),
            )
            yield bar
            yield _figure_line(track, width, plain)


def _figures(values: Mapping[str, float]) -> dict[str, float]:
    """Those of the figures that are there, in the order in which they are shown."""
    tokens, seconds = values.get("perf/tokens"), values.get("timing_s/step")
    figures = {
        "reward": values.get("reward/mean"),
        "tokens/s": tokens / seconds if tokens is not None and seconds else None,
        "length": values.get("response_length/mean"),
        "loss": values.get("actor/loss"),
        "kl": values.get("actor/kl"),
    }
    return {label: float(value) for label, value in figures.items() if value is not None}


def _times(track: _Track, now: float) -> Text:
    left = track.seconds_left(now)
    if track.step >= track.total:
        return Text(clock(track.stamps[-1][1] - track.started), style="green")
    if left is None:
        return Text(clock(now - track.started), style="dim")
    return Text.assemble(("eta ", "dim"), clock(left))


def _figure_line(track: _Track, width: int, plain: bool) -> Text:
    """As many figures as fit, the first ones first."""
    line = Text("  ", no_wrap=True, overflow="crop")
    if not track.figures:
        return line.append("first step is running", style="dim")
    for label, value in track.figures.items():
        shown = Text.assemble(
            (f"{label} ", "dim"), (number(value), "" if math.isfinite(value) else "bold red")
        )
        if label == "reward" and len(track.rewards) > 1 and not plain:
            shown.append(f" {sparkline(track.rewards, _SPARKLINE)}", style="cyan")
        if line.cell_len + shown.cell_len > width:
            break
        line.append_text(shown).append("  ")
    line.rstrip()
    return line


def _plain_line(track: _Track, now: float) -> str:
    parts = [f"{track.name} {track.step}/{track.total}"]
    parts += [f"{label} {number(value)}" for label, value in track.figures.items()]
    left = track.seconds_left(now)
    if left is not None and track.step < track.total:
        parts.append(f"eta {clock(left)}")
    return "  ".join(parts)
