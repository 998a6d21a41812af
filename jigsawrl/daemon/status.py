"""How a cluster stands, from its ledger: whether or not anybody runs it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jigsawrl.daemon.ledger import JobEntry, Ledger, undamaged
from jigsawrl.daemon.runs import job_folder
from jigsawrl.underway import is_under_way

LATELY = 10
"""Events that are told."""


def document(folder: Path) -> dict[str, Any]:
    """For --json."""
    with undamaged(folder):
        found = _document(folder)
        json.dumps(found)
    return found


def _document(folder: Path) -> dict[str, Any]:
    ledger, running = Ledger(folder), is_under_way(folder)
    groups, jobs, nodes = ledger.groups() if running else [], ledger.jobs(), ledger.nodes()
    events, reasons = ledger.events(LATELY), ledger.reasons()
    ledger.close()
    rented = {node for group in groups for node in (*group.rollout_nodes, *group.training_nodes)}
    return {
        "cluster": ledger.config.name,
        "running": running,
        "free_nodes": [name for name, broken in nodes.items() if not broken and name not in rented],
        "broken_nodes": [name for name, broken in nodes.items() if broken],
        "dollars": round(ledger.dollars, 6),
        "dollars_per_hour": round(sum(group.price for group in groups), 4),
        "jobs": {job.name: _job(job, reasons.get(job.name, ""), folder, running) for job in jobs},
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
        "events": events,
    }


def _job(job: JobEntry, why: str, folder: Path, running: bool) -> dict[str, Any]:
    terms = job.terms
    return {
        "state": job.state if job.over or (running and job.state != "submitted") else "waiting",
        "reason": job.reason,
        "why": "" if job.over or not running else why,
        "tenant": terms.tenant,
        "priority": terms.priority,
        "step": job.step,
        "steps": job.steps,
        "group": job.group if running and not job.over else None,
        "submitted": job.submitted,
        "seconds": round(job.spent, 3),
        "slowdown": None if job.slowdown is None else round(job.slowdown, 4),
        "planned_slowdown": None if job.planned is None else round(job.planned, 4),
        "max_slowdown": terms.max_slowdown,
        "deadline": None if terms.deadline is None else job.submitted + terms.deadline,
        "out": str(job_folder(job.name, folder).absolute()),
    }


def show(found: dict[str, Any]) -> None:
    """As tables."""
    console = Console(highlight=False)
    console.print(_jobs(found["jobs"]))
    if found["groups"]:
        console.print(_groups(found["groups"]))
    for name, job in found["jobs"].items():
        if job["why"]:
            console.print(
                escape(f"{name} {'waits' if job['state'] == 'waiting' else 'is there'}: {job['why']}")
            )
    for event in found["events"]:
        who = event["job"] or ""
        console.print(escape(_told(event["at"], who, event["kind"], event["text"].partition("\n")[0])))
    for which in ("free", "broken"):
        if found[f"{which}_nodes"] and found["running"]:
            console.print(f"{which} nodes: {', '.join(found[f'{which}_nodes'])}")
    state = "running" if found["running"] else "not running: 'jigsaw cluster start' goes on with it"
    console.print(
        f"{found['cluster']} is {state}; ${found['dollars']:,.4f} so far, ${found['dollars_per_hour']:,.2f}/h now"
    )


def _jobs(jobs: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=ROUNDED, title="jobs")
    table.add_column("job", overflow="fold")
    table.add_column("state", overflow="fold", min_width=len("cancelled"))
    for name in ("step", "group", "slowdown", "planned", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    terms = [_terms(job) for job in jobs.values()]
    if any(terms):
        table.add_column("terms", overflow="fold")
    for (name, job), asked in zip(jobs.items(), terms, strict=True):
        reason = job["reason"].partition("\n")[0]
        table.add_row(
            name,
            escape(f"{job['state']}: {reason}" if reason else job["state"]),
            f"{job['step']}/{job['steps']}",
            "" if job["group"] is None else str(job["group"]),
            _times(job["slowdown"]) + (" [red]late[/]" if _is_late(job) else ""),
            _times(job["planned_slowdown"]),
            _times(job["max_slowdown"]),
            *([asked] if any(terms) else []),
        )
    return table


def _is_late(job: dict[str, Any]) -> bool:
    """Whether it has ended, and not as it was promised."""
    slow = job["slowdown"]
    return job["state"] == "finished" and slow is not None and slow > job["max_slowdown"]


def _terms(job: dict[str, Any]) -> str:
    """What it asks for besides its slowdown."""
    tenant = job["tenant"] and f"for {job['tenant']}"
    priority = job["priority"] and f"priority {job['priority']}"
    deadline = job["deadline"] and f"by {_clock(job['deadline'])}"
    return ", ".join(filter(None, (tenant, priority, deadline)))


def _groups(groups: list[dict[str, Any]]) -> Table:
    table = Table(box=ROUNDED, title="groups")
    table.add_column("group", justify="right")
    for name in ("jobs", "rollout nodes", "training nodes"):
        table.add_column(name, overflow="fold")
    table.add_column("$/h", justify="right")
    for group in groups:
        shared = group["rollout_nodes"] == group["training_nodes"]
        table.add_row(
            str(group["group"]),
            ", ".join(group["jobs"]),
            ", ".join(group["rollout_nodes"]),
            "the same" if shared else ", ".join(group["training_nodes"]),
            f"{group['dollars_per_hour']:,.2f}",
        )
    return table


def _told(at: float, *parts: str) -> str:
    return f"{_clock(at)} {': '.join(filter(None, parts))}"


def _clock(at: float) -> str:
    """With the day, where that is not today."""
    then, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"
