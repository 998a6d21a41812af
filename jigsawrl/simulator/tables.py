"""Simulations as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from jigsawrl.graph.profile import Profile
from jigsawrl.simulator.fitted import STAGES, Fitted
from jigsawrl.simulator.from_config import Figure, Scene
from jigsawrl.telemetry.comparison import Fate, Side
from jigsawrl.telemetry.text import counted, duration, number

_SURE = {"measured": "green", "carried over": "cyan", "prior": "yellow"}


@dataclass(frozen=True, slots=True)
class SceneTable:
    """What is simulated, and where its figures come from."""

    scene: Scene

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scene = self.scene
        yield Text.assemble(
            (scene.config.name, "bold"),
            f": {counted(len(scene.jobs), 'pipeline')} on {counted(scene.config.workers, 'worker')} "
            f"({scene.hardware.name}), simulated with profile {scene.profile.name}",
        )
        dim = [Column(style="dim", no_wrap=True) for _ in range(2)]
        grid = Table.grid(*dim, Column(overflow="fold"), padding=(0, 2))
        for job, origin in zip(scene.jobs, scene.origins, strict=True):
            shape = job.shape
            about = f"{shape.model.name}, {counted(shape.steps, 'step')} of {shape.sequences:,} sequences"
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

    run: Side

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fates = self.run.fates
        asked = any(fate.kept is not None for fate in fates.values())
        tokens = f"{self.run.tokens:,} tokens generated"
        rate = f"{self.run.tokens_per_second:,.0f} a second"
        heads = ("time", "alone", "slowdown", *(["asked"] if asked else []))
        table = Table(
            Column("pipeline", overflow="fold"),
            *(Column(head, justify="right") for head in heads),
            box=ROUNDED,
            title="against alone on all workers",
            caption=f"{tokens}, {rate}",
        )
        for name, fate in fates.items():
            table.add_row(name, *fate.times("x"), *([_asked(fate)] if asked else []))
        yield table


def _asked(fate: Fate) -> Text:
    if fate.kept is None:
        return Text("")
    wishes = []
    if fate.max_slowdown is not None:
        wishes.append(f"at most {fate.max_slowdown:g}x")
    if fate.deadline is not None:
        wishes.append(f"in {duration(fate.deadline)}")
    verdict = ("kept", "green") if fate.kept else ("missed", "red")
    return Text.assemble(f"{', '.join(wishes)}: ", verdict)


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A profile against the logs that it was fitted to."""

    profile: Profile
    workloads: Sequence[Fitted]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(
            Column("workload", overflow="fold"),
            *(Column(stage, justify="right", no_wrap=True) for stage in STAGES),
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            title=Text(f"{self.profile.name}, on {self.profile.hardware.name}", style="bold"),
            caption="seconds of a step, fitted / logged, and how far a step is off on average",
        )
        for each in self.workloads:
            about = f"{each.model}, {counted(each.steps, 'step')}, {each.mean_length:,.0f} tokens"
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
