"""The commands about a cluster of jobs: where they would go, what that costs, and a real one. None imports torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jigsawrl.cli_help import Command, Commands
from jigsawrl.errors import JigsawError
from jigsawrl.streams import stdout_is_a_log

if TYPE_CHECKING:
    from jigsawrl.cluster.from_config import Scene
    from jigsawrl.cluster.plan import Plan
    from jigsawrl.cluster.simulation import Outcome

MOST_ROWS = 40
"""Jobs that a table shows; --json has all."""


def add_to(app: typer.Typer) -> None:
    """Makes these commands of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw plan cluster.yaml jobs.yaml -- who shares which nodes, and why (see examples/cluster)\n"
        "jigsaw plan cluster.yaml jobs.yaml quantile=0.9 --json -- planned less cautiously, as JSON\n"
        "jigsaw simulate cluster.yaml trace.yaml -- the same jobs as they come and go",
    )(plan)
    cluster = typer.Typer(cls=Commands)
    cluster.command(
        cls=Command,
        epilog="jigsaw cluster start local.yaml --out runs/local -- two pools of cores (see examples/cluster)\n"
        "jigsaw submit runs/local job.yaml -- from another terminal: a job for it\n"
        "jigsaw cluster start local.yaml --out runs/local -- goes on after a stop, or a kill",
    )(start)
    cluster.command(
        cls=Command,
        epilog="jigsaw cluster status runs/local -- jobs, groups, nodes, dollars, and what happened last\n"
        "jigsaw cluster status runs/local --json | jq .jobs.first.step -- for scripts",
    )(status)
    app.add_typer(
        cluster,
        name="cluster",
        help="Run a small real cluster on this machine, and see how it stands.",
        epilog="jigsaw cluster start local.yaml --out runs/local -- runs until Ctrl-C\n"
        "jigsaw submit runs/local job.yaml -- a job for it, also while it does not run\n"
        "jigsaw cluster status runs/local -- how it stands\n"
        "jigsaw cancel runs/local job -- ends a job after its step, saved",
    )


def plan(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER", help="Cluster file (YAML): pools and prices.")
    ],
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="Jobs file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c ...", help="Settings that replace those in CLUSTER."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Say which jobs would share which nodes of a cluster, at what price.

    Jobs are put into groups that rent as little as possible, so that the state of each stays in the host memory of
    its nodes and none takes longer than its max_slowdown allows. Nothing is run.
    """
    from jigsawrl.cluster.plan import plan as planned

    found = planned(_scene(cluster, jobs, overrides or []))
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _print_plan(found)


def start(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER", help="Cluster file (YAML) with pools of kind cpu.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c ...", help="Settings that replace those in CLUSTER."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The cluster's folder; if not given, runs/NAME.")
    ] = None,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="End when all jobs are over, after the first one came.")
    ] = False,
) -> None:
    """Run a cluster of local workers, to which `jigsaw submit` sends jobs.

    Each node is some of this machine's cores. Jobs are put into groups as `jigsaw plan` does it, and every group is a
    run on its nodes. Ctrl-C stops it: steps are finished and saved, and starting it again goes on. After a kill, of
    anything, jobs go on from their last steps. Each job's metrics and model are in DIR/jobs/NAME.
    """
    from jigsawrl.config.cluster import load_cluster_file
    from jigsawrl.daemon.start import start as started

    stdout_is_a_log()
    config = load_cluster_file(cluster, overrides or [])
    raise typer.Exit(started(config, out or Path("runs", config.name), until_done, _say))


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The cluster's folder.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Say how the jobs and groups of a cluster stand, what it has cost so far, and what happened last.

    A job's slowdown is how many times as long as alone it has taken so far, waiting included: measured, as it is
    planned from now on, and what it was promised at most.
    """
    from jigsawrl.daemon.status import document, show

    found = document(folder)
    if as_json:
        print(json.dumps(found))
    else:
        show(found)


def simulate_trace(
    cluster: Path, arguments: list[str], seed: int | None, as_json: bool, others: dict[str, object]
) -> None:
    """`jigsaw simulate` with a cluster file: the second argument is a trace, others are overrides."""
    for option in (name for name, value in others.items() if value is not None):
        raise JigsawError(f"{option}: is for run files; {cluster} is a cluster file, leave it out")
    if not arguments or "=" in arguments[0]:
        raise JigsawError(
            f"{cluster}: is a cluster file; name a trace (a jobs file with arrivals) after it, such as\n"
            f"jigsaw simulate {cluster} trace.yaml"
        )
    from jigsawrl.cluster.plan import outcome_document, scheduler_of
    from jigsawrl.cluster.scheduler import Scheduler
    from jigsawrl.cluster.simulation import ClusterSimulation

    scene = _scene(cluster, Path(arguments[0]), arguments[1:])
    solo = Scheduler(scene.cluster, level=scene.config.quantile, largest=1)
    outcome, alone = (
        ClusterSimulation(scheduler, scene.jobs, seed=seed or 0, failures=scene.failures).run()
        for scheduler in (scheduler_of(scene), solo)
    )
    if as_json:
        print(json.dumps(outcome_document(scene, outcome, alone)))
    else:
        _print_outcome(scene, outcome, alone)


def _scene(cluster: Path, jobs: Path, overrides: list[str]) -> Scene:
    from jigsawrl.cluster.from_config import scene_of
    from jigsawrl.config.cluster import load_cluster_file, load_jobs_file

    return scene_of(load_cluster_file(cluster, overrides), load_jobs_file(jobs))


def _print_plan(plan: Plan) -> None:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=ROUNDED, title="groups")
    table.add_column("group", justify="right")
    for name in ("jobs", "rollout nodes", "training nodes", "order"):
        table.add_column(name, overflow="fold")
    table.add_column("$/h", justify="right")
    for group in plan.scheduler.groups.values():
        shape = group.shape
        table.add_row(
            str(group.number),
            ", ".join(group.standings),
            ", ".join(group.rollout_nodes),
            "the same" if shape.shared else ", ".join(group.training_nodes),
            shape.verdict.order if len(group.standings) > 1 else "alone",
            f"{shape.price:,.2f}",
        )
    console.print(table)
    table = Table(box=ROUNDED, title="jobs")
    table.add_column("job", overflow="fold")
    table.add_column("group", justify="right")
    for name in ("slowdown", "at most"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for job in plan.scene.jobs[:MOST_ROWS]:
        slow, decision = plan.slowdown(job.name), plan.decisions[job.name]
        where = "waits" if slow is None else str(plan.scheduler.home[job.name])
        planned = "" if slow is None else f"{slow:.2f}x"
        table.add_row(job.name, where, planned, f"{job.max_slowdown:.2f}x", decision.why)
    console.print(table)
    if len(plan.scene.jobs) > MOST_ROWS:
        console.print(f"and {len(plan.scene.jobs) - MOST_ROWS} more; --json shows all", style="dim")
    for name, hours in plan.too_late.items():
        deadline = next(job.deadline for job in plan.scene.jobs if job.name == name)
        console.print(
            f"[red]{name}[/] takes {hours:,.1f} h alone: too long for its deadline ({deadline:,g} h)"
        )
    waiting = len(plan.scheduler.waiting)
    beside = f", without the {waiting:,} that {'waits' if waiting == 1 else 'wait'}" if waiting else ""
    console.print(
        f"${plan.scheduler.price:,.2f} an hour, {_times(plan.alone, plan.scheduler.price)} less than "
        f"${plan.alone:,.2f} with every job alone{beside}"
    )


def _print_outcome(scene: Scene, outcome: Outcome, alone: Outcome) -> None:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=ROUNDED, title="jobs")
    table.add_column("job", overflow="fold")
    disturbed = any(record.preempted for record in outcome.records.values())
    columns = ("came at h", "took h", "waited h", "slowdown", "at most", "moves", "stopped")
    for name in columns if disturbed else columns[:-1]:
        table.add_column(name, justify="right")
    for record in list(outcome.records.values())[:MOST_ROWS]:
        took = "" if record.finished is None else f"{(record.finished - record.arrived) / 3600:,.1f}"
        mark = "" if record.kept else " [red]late[/]"
        if not record.in_time:
            took += f" [red]of {record.job.deadline:,g}[/]"
        table.add_row(
            record.job.name,
            f"{record.arrived / 3600:,.1f}",
            took,
            f"{record.waited / 3600:,.1f}",
            f"{record.slowdown:.2f}x{mark}",
            f"{record.job.max_slowdown:.2f}x",
            str(record.moves),
            *([str(record.preempted)] if disturbed else []),
        )
    console.print(table)
    if len(outcome.records) > MOST_ROWS:
        console.print(f"and {len(outcome.records) - MOST_ROWS} more; --json shows all", style="dim")
    for pool, peak in outcome.peak_nodes.items():
        console.print(f"{pool}: {peak} nodes at most, busy for {outcome.busy[pool]:.0%} of the rented time")
    console.print(
        f"${outcome.dollars:,.0f} in {outcome.seconds / 3600:,.1f} h (${outcome.dollars_per_hour:,.2f} an hour), "
        f"{_times(alone.dollars, outcome.dollars)} less than ${alone.dollars:,.0f} with every job alone; "
        f"{outcome.slo_attainment:.1%} of the jobs took at most their max_slowdown"
    )
    if late := sum(not record.in_time for record in outcome.records.values()):
        console.print(f"[red]{late:,} missed {'its deadline' if late == 1 else 'their deadlines'}[/]")


def _times(more: float, less: float) -> str:
    return f"{more / less:.2f} times" if less else "no"
