"""What a person sees while pipelines run.

On a terminal a bar for a pipeline with the figures that matter below it, or a line for each pipeline and each worker
that they share; elsewhere plain lines, at most about one a second for each pipeline, the first and the last step
always among them, and one that says what is under way where nothing was printed for half a minute; with `json`,
nothing on stdout. What cannot be written, to a terminal that has closed or a full disk, is left out.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jigsawrl.streams import forgiving
from jigsawrl.telemetry.board import PipelineLine, WorkerLine, board
from jigsawrl.telemetry.heartbeat import Heartbeat
from jigsawrl.telemetry.text import clock, number, sparkline
from jigsawrl.telemetry.track import Track

_MAX_WIDTH = 100
_MAX_NAME = 24
_SPARKLINE = 8
_SECONDS_BETWEEN_LINES = 1.0


class Shown(Protocol):
    """Whoever shows a pipeline's progress to people."""

    def start(self, name: str, total_steps: int, done: int = 0) -> None: ...

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def doing(self, name: str, step: int, what: str, done: int = 0, of: int = 0) -> None:
        """A pipeline is at this, and so many samples of it are done; empty: at nothing."""


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
            terminal = sys.stdout is not None and sys.stdout.isatty()
            file = forgiving(sys.stderr if json else sys.stdout)
            console = Console(file=file, highlight=False, force_interactive=None if terminal else False)
        self._console = console
        self._json = json
        self._now = now
        self._tracks: dict[str, Track] = {}
        self._standing: tuple[Sequence[PipelineLine], Sequence[WorkerLine]] = (), ()
        self._live: Live | None = None
        self._heartbeat = Heartbeat(now())

    @property
    def on_terminal(self) -> bool:
        """Whether there is a display that changes in its place."""
        return self._console.is_interactive and not self._json

    def doing(self, name: str, step: int, what: str, done: int = 0, of: int = 0) -> None:
        """For the line that says what is under way, where no display does."""
        if not self.on_terminal:
            self._heartbeat.doing(name, step, what, self._now(), done, of)

    def beat(self) -> None:
        """Prints what is under way, if nothing was printed for long. May be called from any thread."""
        if not self.on_terminal and (line := self._heartbeat.line(self._now())) is not None:
            self.message(line)

    def opening(self, text: str) -> None:
        """A line at the start: what runs, and where to."""
        self.message(text)

    def start(self, name: str, total_steps: int, done: int = 0) -> None:
        """Adds a pipeline, of which `done` steps were made in earlier runs."""
        track = Track(name, total_steps, done, self._now())
        track.stamps.append((done, track.started))
        if name in self._tracks:  # it has died, and comes back
            before = self._tracks[name]
            track = replace(track, figures=before.figures, rewards=before.rewards, line_at=before.line_at)
        self._tracks[name] = track
        self._show()

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Shows that a step is done, with its metrics by their names in metrics.jsonl."""
        track, now = self._tracks[name], self._now()
        first = len(track.stamps) == 1
        track.made(step, values, now)
        if self._live is not None or self._json:
            return
        if first or step >= track.total or now - track.line_at >= _SECONDS_BETWEEN_LINES:
            track.line_at = now
            self.message(_plain_line(track, now))

    def standing(self, pipelines: Sequence[PipelineLine], workers: Sequence[WorkerLine]) -> None:
        """Where all pipelines stand and what runs on the workers they share; shown on a terminal only."""
        if self.on_terminal:
            self._standing = pipelines, workers
            self._show()

    def _show(self) -> None:
        if self._live is None and self.on_terminal:
            self._live = Live(console=self._console, get_renderable=lambda: self, refresh_per_second=4)
            self._live.start()

    def message(self, text: str) -> None:
        """Prints above the bars; with `json`, on stderr."""
        self._heartbeat.printed(self._now())
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
        pipelines, workers = self._standing
        if pipelines:
            yield from board(dict(self._tracks), pipelines, workers, now, width, plain)
            return
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


def _times(track: Track, now: float) -> Text:
    left = track.seconds_left(now)
    if track.step >= track.total:
        return Text(clock(track.stamps[-1][1] - track.started), style="green")
    if left is None:
        return Text(clock(now - track.started), style="dim")
    return Text.assemble(("eta ", "dim"), clock(left))


def _figure_line(track: Track, width: int, plain: bool) -> Text:
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


def _plain_line(track: Track, now: float) -> str:
    parts = [f"{track.name} {track.step}/{track.total}"]
    parts += [f"{label} {number(value)}" for label, value in track.figures.items()]
    left = track.seconds_left(now)
    if left is not None and track.step < track.total:
        parts.append(f"eta {clock(left)}")
    return "  ".join(parts)
