"""Many pipelines are placed in groups of workers, each planned for by itself."""

from __future__ import annotations

from graph.planning import WORKER, job

from jigsawrl.graph.interference import H200
from jigsawrl.policies.jigsaw import Jigsaw
from jigsawrl.policies.named import POLICIES
from jigsawrl.simulator.jobs import Failure, Job
from jigsawrl.simulator.simulation import Outcome, Simulation

WORKERS = 64


def sweep(count: int, tp: int = 1) -> list[Job]:
    return [job(f"{number:02}", seed=number, sigma=1.2, steps=2, tp=tp) for number in range(count)]


def simulate(policy: str, jobs: list[Job], *failures: Failure) -> Outcome:
    return Simulation(POLICIES[policy], jobs, WORKER, WORKERS, H200, failures=failures).run()


def widths(outcome: Outcome) -> list[int]:
    """Workers of every phase that was started."""
    starts = [each for each in outcome.log if each.get("action") == "start"]
    return [len({worker for place in each["places"] for worker in place}) for each in starts]


def test_many_pipelines_keep_to_groups_of_workers_and_are_done_sooner() -> None:
    grouped, uncontrolled = (simulate(name, sweep(12)) for name in ("jigsaw", "concurrent"))
    assert max(widths(grouped)[:12]) <= WORKERS // 2
    assert grouped.seconds < uncontrolled.seconds / 1.05


def test_a_few_have_all_workers() -> None:
    assert max(widths(simulate("jigsaw", sweep(3)))) == WORKERS


def test_groups_do_without_workers_that_are_lost_and_take_those_that_return() -> None:
    failures = Failure(3, at=1.0, back=5.0), Failure(40, at=2.0)
    for tp in (1, 4):
        assert len(simulate("jigsaw", sweep(12, tp), *failures).finished) == 12


def test_without_looking_ahead_there_are_no_groups() -> None:
    outcome = Simulation(Jigsaw(lookahead=False), sweep(12), WORKER, WORKERS, H200).run()
    assert max(widths(outcome)) == WORKERS
