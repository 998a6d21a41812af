"""Commands for a run that is under way, or a cluster: submit, pause, resume, cancel. They do not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from jigsawrl.cli_help import Command
from jigsawrl.errors import JigsawError

CLUSTER = "Jobs of a cluster"

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of several pipelines, under way.")]
RunOrCluster = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of a run of several pipelines, under way, or of a cluster."),
]
Pipeline = Annotated[str, typer.Argument(metavar="PIPELINE", help="Its name in the run.")]


def add_to(app: typer.Typer) -> None:
    """Makes them commands of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw submit runs/four more.yaml -- a fifth pipeline, from now on\n"
        "jigsaw submit runs/four more.yaml --name urgent --priority 1 -- it goes first\n"
        "jigsaw submit runs/local job.yaml --max-slowdown 2 --tenant vision -- a job for a cluster",
    )(submit)
    app.command(cls=Command, epilog="jigsaw pause runs/four sums -- it waits after its phase")(pause)
    app.command(cls=Command, epilog="jigsaw resume runs/four sums -- it goes on")(resume)
    app.command(
        cls=Command,
        epilog="jigsaw cancel runs/four sums -- it stops after its step, saved\n"
        "jigsaw cancel runs/local first -- a cluster's job, also one that waits",
    )(cancel)


def submit(
    run: RunOrCluster,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file with one pipeline.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name; if not given, the file's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps, if not as the file says.")] = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Higher goes first.")] = 0,
    max_slowdown: Annotated[
        float | None,
        typer.Option(metavar="X", help="Times as long as alone, at most; in a cluster 1.5 if not given."),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds from now until it should be done.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose it is: free nodes go to whoever has least.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    rollout_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Nodes that its rollouts take; 1 if not given.", rich_help_panel=CLUSTER
        ),
    ] = None,
    training_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Nodes that its training takes; 1 if not given.", rich_help_panel=CLUSTER
        ),
    ] = None,
) -> None:
    """Add a pipeline to a run that is under way, or a job to a cluster.

    A cluster's job is safe as soon as this returns, whether or not the cluster is running; what could never run there
    is refused with the reason. Where it went, and why, `jigsaw cluster status` shows.
    """
    of_clusters = {"tenant": tenant, "rollout_nodes": rollout_nodes, "training_nodes": training_nodes}
    if _is_cluster(run):
        terms = {"priority": priority, "max_slowdown": max_slowdown, "deadline": deadline, **of_clusters}
        _submit_job(run, file, name, steps, terms)
        return
    for option, value in of_clusters.items():
        if value is not None:
            raise JigsawError(
                f"--{option.replace('_', '-')}: is for clusters, and {run} is none; leave it out"
            )
    from jigsawrl.config.pipelines import run_of

    config = run_of(file)
    entry: dict[str, Any] = {"run": os.path.abspath(file), "steps": steps, "priority": priority}
    entry |= {"max_slowdown": max_slowdown, "deadline": deadline}
    _ask(run, do="submit", name=name or config.name, entry=entry)


def pause(run: Run, pipeline: Pipeline) -> None:
    """Let a pipeline wait after its phase, until it is resumed."""
    _refuse_cluster(run)
    _ask(run, do="pause", pipeline=pipeline)


def resume(run: Run, pipeline: Pipeline) -> None:
    """Let a paused pipeline go on. (A run that has ended goes on with `jigsaw run FILE --resume`.)

    A cancelled one goes on with the next --resume of its run, if the run has ended.
    """
    from jigsawrl.config.pipelines import holds_pipelines
    from jigsawrl.config.started import RESOLVED
    from jigsawrl.runtime.requests import take_back
    from jigsawrl.underway import is_under_way

    _refuse_cluster(run)
    if (run / RESOLVED).exists() and holds_pipelines(run / RESOLVED) and not is_under_way(run):
        take_back(run, pipeline)
        print(f"{pipeline}: goes on when the run goes on with --resume")
        return
    _ask(run, do="resume", pipeline=pipeline)


def cancel(run: RunOrCluster, pipeline: Pipeline) -> None:
    """End a pipeline, or a cluster's job: the step it is in is finished and saved."""
    if _is_cluster(run):
        from jigsawrl.daemon.ledger import Ledger
        from jigsawrl.underway import is_under_way

        ledger = Ledger(run)
        ledger.ask_to_cancel(pipeline)
        runs = is_under_way(run) and ledger.job(pipeline).state == "running"
        print(f"{pipeline}: {'ends after its step' if runs else 'is cancelled'}")
        return
    _ask(run, do="cancel", pipeline=pipeline)


def _is_cluster(folder: Path) -> bool:
    from jigsawrl.daemon.ledger import FILE

    return (folder / FILE).exists()


def _refuse_cluster(folder: Path) -> None:
    if _is_cluster(folder):
        raise JigsawError(f"{folder}: is a cluster, whose jobs cannot be paused, only cancelled")


def _submit_job(folder: Path, file: Path, name: str | None, steps: int | None, terms: dict[str, Any]) -> None:
    from jigsawrl.daemon.admission import submit as submit_job
    from jigsawrl.underway import is_under_way

    job, new = submit_job(folder, file, name, steps, terms)
    if not new:
        print(f"{job.name}: was submitted before, and is there already; nothing is changed")
        return
    print(f"{job.name}: submitted{'' if is_under_way(folder) else '; it waits until the cluster is started'}")


def _ask(run: Path, **request: Any) -> None:
    from jigsawrl.daemon.runs import job_folder
    from jigsawrl.runtime.control import ask

    cluster = run.parent.parent
    if _is_cluster(cluster) and run == job_folder(run.name, cluster):
        raise JigsawError(
            f"{run}: is a job of a cluster, and can only be cancelled: 'jigsaw cancel {cluster} {run.name}'"
        )
    answer = ask(run, **request)
    for name, standing in answer.get("pipelines", {}).items():
        print(f"{name}: {standing}")
    if answer.get("said"):
        print(answer["said"])
