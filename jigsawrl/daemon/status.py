"""How a cluster stands, from its ledger: whether or not anybody runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from jigsawrl.daemon.ledger import JobEntry, Ledger, is_running
from jigsawrl.daemon.runs import job_folder


def document(folder: Path) -> dict[str, Any]:
    """For --json."""
    ledger, running = Ledger(folder), is_running(folder)
    groups, jobs, nodes = ledger.groups() if running else [], ledger.jobs(), ledger.nodes()
    ledger.close()
    return {
        "cluster": ledger.config.name,
        "running": running,
        "broken_nodes": [name for name, broken in nodes.items() if broken],
        "dollars": round(ledger.dollars, 6),
        "dollars_per_hour": round(sum(group.price for group in groups), 4),
        "jobs": {job.name: _job(job, folder, running) for job in jobs},
        "groups": [
            {
                "group": group.number,
                "jobs": list(group.jobs),
                "rollout_nodes": list(group.rollout_nodes),
                "training_nodes": list(group.training_nodes),
                "dollars_per_hour": round(group.price, 4),
            }
            for group in groups
        ],
    }


def _job(job: JobEntry, folder: Path, running: bool) -> dict[str, Any]:
    return {
        "state": job.state if job.over or (running and job.state != "submitted") else "waiting",
        "reason": job.reason,
        "step": job.step,
        "steps": job.steps,
        "group": job.group if running and not job.over else None,
        "seconds": round(job.spent, 3),
        "slowdown": None if job.slowdown is None else round(job.slowdown, 4),
        "planned_slowdown": None if job.planned is None else round(job.planned, 4),
        "max_slowdown": job.terms.max_slowdown,
        "out": str(job_folder(job.name, folder).absolute()),
    }


def show(found: dict[str, Any]) -> None:
    """As tables."""
    console = Console(highlight=False)
    table = Table(box=ROUNDED, title="jobs")
    table.add_column("job", overflow="fold")
    table.add_column("state", overflow="fold")
    for name in ("step", "group", "slowdown", "planned", "at most"):
        table.add_column(name, justify="right")
    for name, job in found["jobs"].items():
        reason = job["reason"].partition("\n")[0]
        table.add_row(
            name,
            f"{job['state']}: {reason}" if reason else job["state"],
            f"{job['step']}/{job['steps']}",
            "" if job["group"] is None else str(job["group"]),
            _times(job["slowdown"]),
            _times(job["planned_slowdown"]),
            _times(job["max_slowdown"]),
        )
    console.print(table)
    table = Table(box=ROUNDED, title="groups")
    table.add_column("group", justify="right")
    for name in ("jobs", "rollout nodes", "training nodes"):
        table.add_column(name, overflow="fold")
    table.add_column("$/h", justify="right")
    for group in found["groups"]:
        shared = group["rollout_nodes"] == group["training_nodes"]
        table.add_row(
            str(group["group"]),
            ", ".join(group["jobs"]),
            ", ".join(group["rollout_nodes"]),
            "the same" if shared else ", ".join(group["training_nodes"]),
            f"{group['dollars_per_hour']:,.2f}",
        )
    if found["groups"]:
        console.print(table)
    if found["broken_nodes"]:
        console.print(f"broken: {', '.join(found['broken_nodes'])}")
    state = "running" if found["running"] else "not running: 'jigsaw cluster start' goes on with it"
    console.print(
        f"{found['cluster']} is {state}; ${found['dollars']:,.4f} so far, ${found['dollars_per_hour']:,.2f}/h now"
    )


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"
