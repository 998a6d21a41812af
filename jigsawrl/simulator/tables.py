"""Simulations as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jigsawrl.graph.profile import Profile
from jigsawrl.simulator.compare import Fate, Simulated, best_of, vs_serial
from jigsawrl.simulator.fitted import STAGES, Fitted
from jigsawrl.simulator.from_config import Figure, Scene
from jigsawrl.telemetry.text import duration, number

_BAR = 30
_MOST_CAUSES = 3
_CLOSE = (0, 1, 0, 0)
_SURE = {"measured": "green", "carried over": "cyan", "prior": "yellow"}


@dataclass(frozen=True, slots=True)
class SceneTable:
    """What is simulated, and where its figures come from."""

    scene: Scene

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scene = self.scene
        yield Text.assemble(
            (scene.name, "bold"),
            f": {_count(len(scene.jobs), 'pipeline')} on {_count(scene.workers, 'worker')} "
            f"({scene.hardware.name}), simulated with profile {scene.profile}",
        )
        grid = Table.grid(padding=(0, 2))
        for _ in range(2):
            grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for job, origin in zip(scene.jobs, scene.origins, strict=True):
            shape = job.shape
            about = f"{shape.model.name}, {_count(shape.steps, 'step')} of {shape.sequences:,} sequences"
            grid.add_row("", Text(shape.name, style="bold not dim"), about)
            grid.add_row("", "  lengths", _figure(origin.lengths))
            grid.add_row("", "  costs", _figure(origin.costs))
            for note in origin.notes:
                grid.add_row("", "  assumed", note)
        yield grid


def _figure(figure: Figure) -> Text:
    return Text.assemble((figure.kind, _SURE[figure.kind]), f": {figure.source}")


@dataclass(frozen=True, slots=True)
class FateTable:
    """Each pipeline's time against its time alone."""

    run: Simulated

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fates = self.run.fates
        asked = any(fate.kept is not None for fate in fates.values())
        tokens = f"{sum(self.run.outcome.tokens.values()):,.0f} tokens generated"
        rate = f"{self.run.tokens_per_second:,.0f} a second"
        table = Table(box=ROUNDED, title="against alone on all workers", caption=f"{tokens}, {rate}")
        table.add_column("pipeline", overflow="fold")
        for name in ("time", "alone", "slowdown", *(["asked"] if asked else [])):
            table.add_column(name, justify="right")
        for name, fate in fates.items():
            cells = [duration(fate.seconds), duration(fate.alone), f"{fate.slowdown:.2f}x"]
            table.add_row(name, *cells, *([_asked(fate)] if asked else []))
        yield table


def _asked(fate: Fate) -> Text:
    wishes = []
    if fate.max_slowdown is not None:
        wishes.append(f"at most {fate.max_slowdown:g}x")
    if fate.deadline is not None:
        wishes.append(f"in {duration(fate.deadline)}")
    if fate.kept is None:
        return Text("")
    verdict = ("kept", "green") if fate.kept else ("missed", "red")
    return Text.assemble(f"{', '.join(wishes)}: ", verdict)


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """Policies side by side."""

    runs: Sequence[Simulated]
    serial: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        best = best_of(self.runs)
        table = Table(
            box=SIMPLE_HEAD,
            padding=_CLOSE,
            caption="vs serial: throughput; slowdown: of a pipeline against alone, mean and worst",
        )
        table.add_column("policy", no_wrap=True)
        for name in ("time", "vs serial", "slowdown", "worst", "busy"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("largest bubbles", overflow="fold")
        for run in self.runs:
            chosen = run is best and len(self.runs) > 1
            table.add_row(
                f"{run.policy} {'*' if options.ascii_only else '★'}" if chosen else run.policy,
                duration(run.seconds),
                f"{vs_serial(run, self.serial):.2f}x",
                f"{run.mean_slowdown:.2f}x",
                f"{run.worst_slowdown:.2f}x",
                f"{run.report.busy_fraction:.0%}",
                _bubbles(run),
                style="bold green" if chosen else "",
            )
        yield table
        yield self._bars(best, "#" if options.ascii_only else "█")

    def _bars(self, best: Simulated, block: str) -> Table:
        """Time until all are done, a bar each."""
        longest = max(run.seconds for run in self.runs)
        grid = Table.grid(padding=(0, 2))
        for run in self.runs:
            cells = round(_BAR * run.seconds / longest) if longest else 0
            bar = Text(block * max(1, cells), style="green" if run is best else "cyan")
            grid.add_row(f"  {run.policy}", bar, duration(run.seconds))
        return grid


def _bubbles(run: Simulated) -> str:
    largest = sorted(run.bubbles().items(), key=lambda part: -part[1])[:_MOST_CAUSES]
    return ", ".join(f"{cause} {part:.0%}" for cause, part in largest if part >= 0.005) or "none"


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A profile against the logs that it was fitted to."""

    profile: Profile
    workloads: Sequence[Fitted]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(
            box=SIMPLE_HEAD,
            padding=_CLOSE,
            title=Text(f"{self.profile.name}, on {self.profile.hardware.name}", style="bold"),
            caption="seconds of a step, fitted / logged, and how far a step is off on average",
        )
        table.add_column("workload", overflow="fold")
        for stage in STAGES:
            table.add_column(stage, justify="right", no_wrap=True)
        for each in self.workloads:
            about = f"{each.model}, {_count(each.steps, 'step')}, {each.mean_length:,.0f} tokens"
            unsure = " ~" if each.reconstructed else ""
            name = Text.assemble(each.name, "\n", (f"  {about}{unsure}", "dim"))
            table.add_row(name, *(_stage(each, stage) for stage in STAGES))
        yield table
        if any(each.reconstructed for each in self.workloads):
            yield Text("~ the log has no lengths of single sequences; their spread is made up", style="dim")


def _stage(each: Fitted, stage: str) -> Text:
    if stage not in each.stages:
        return Text("-", style="dim")
    found = each.stages[stage]
    colour = "green" if found.error <= 0.1 else "yellow" if found.error <= 0.2 else "red"
    seconds = f"{number(found.fitted)} / {number(found.logged)}"
    return Text.assemble(seconds, "\n", (f"{found.error:.0%}", colour))


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
