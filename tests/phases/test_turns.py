"""Taking turns: each worker belongs to one phase at a time, and orders are kept as they are promised."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.phases.roll_forward import Moment, roll_forward
from jigsawrl.phases.rounds import Turn, round_seconds
from jigsawrl.phases.turns import AS_READY, BY_NEED, ORDERS, ROLLOUT, ROUND_ROBIN, Order, PhasedJob

MOMENTS = 120
SECONDS = st.integers(1, 60).map(float)
orders = st.sampled_from(list(ORDERS.values()))


@st.composite
def groups(draw: st.DrawFn, ends: bool = True, shared: bool | None = None) -> list[PhasedJob]:
    """One to five jobs with rollouts on some of three workers, and trainings on another one or, `shared`, on all."""
    jobs = []
    both = draw(st.booleans()) if shared is None else shared
    for number in range(draw(st.integers(1, 5))):
        rollout, training = draw(SECONDS), draw(SECONDS)
        hold = rollout * draw(st.sampled_from([0.5, 1.0]))
        workers = draw(st.integers(1, 7)), 7 if both else 8
        limit = draw(st.sampled_from([1.0, 1.5, 3.0])) * (rollout + training)
        steps = draw(st.integers(1, 5)) if ends else math.inf
        seconds, holds = (rollout, training), (hold, training)
        jobs.append(PhasedJob("abcde"[number], number, seconds, holds, workers, limit, limit, steps))
    return jobs


@given(groups(), orders)
def test_no_worker_ever_belongs_to_two_phases(jobs: list[PhasedJob], order: Order) -> None:
    for _ in islice(roll_forward(jobs, order, math.inf), MOMENTS):
        held = [job.held for job in jobs]
        assert sum(held) == sum(1 << bit for bit in range(4) if any(each >> bit & 1 for each in held))
        assert all(job.held in (0, job.needed) for job in jobs if job.ends is not None)


@given(groups(), orders)
def test_every_order_makes_all_steps_and_none_twice(jobs: list[PhasedJob], order: Order) -> None:
    wanted = {job.name: 2 * job.steps for job in jobs}
    started = dict.fromkeys(wanted, 0)
    for _, _, starts in roll_forward(jobs, order, math.inf):
        for job in starts:
            started[job.name] += 1
    assert started == wanted
    assert all(job.steps == 0 for job in jobs)


@given(groups(ends=False))
def test_as_ready_no_job_waits_but_for_one_that_runs_or_came_before(jobs: list[PhasedJob]) -> None:
    """So no worker idles that the first in line could use."""
    for _ in islice(roll_forward(jobs, AS_READY, math.inf), MOMENTS):
        taken = 0
        for job in jobs:
            taken |= job.held
        for job in sorted((job for job in jobs if job.since is not None), key=lambda j: (j.since, j.number)):
            assert taken & job.needed
            taken |= job.needed


@given(groups(ends=False))
def test_by_need_no_job_takes_a_worker_from_one_that_is_due_sooner(jobs: list[PhasedJob]) -> None:
    """But of one that it would only wait for: its worker is then kept free, or another's."""
    for _, _, starts in islice(roll_forward(jobs, BY_NEED, math.inf), MOMENTS):
        busy = 0
        for job in set(jobs).difference(starts):
            busy |= job.held
        for job in starts:
            sooner = [other for other in jobs if other.since is not None and other.due < job.due]
            blocked = [other for other in sooner if other.needed & busy]
            assert not any(other.needed & job.workers[job.phase] for other in blocked)


@given(groups(ends=False, shared=False))
def test_in_rounds_jobs_alternate_on_every_worker_that_they_share(jobs: list[PhasedJob]) -> None:
    counts = {job.name: [0, 0] for job in jobs}
    for _, _, starts in islice(roll_forward(jobs, ROUND_ROBIN, math.inf), MOMENTS):
        for job in starts:
            counts[job.name][job.phase] += 1
        for one in jobs:
            for other in jobs[one.number + 1 :]:
                for phase in (0, 1):
                    if one.workers[phase] & other.workers[phase]:
                        assert 0 <= counts[one.name][phase] - counts[other.name][phase] <= 1


@given(groups(ends=False, shared=False))
def test_a_round_takes_as_long_as_the_longest_job_or_the_busiest_worker(jobs: list[PhasedJob]) -> None:
    """RollMux's bound, which is met where no tail overlaps another rollout."""
    for job in jobs:
        job.workers, job.holds = (1, 8), job.seconds
    turns = [
        Turn(job.name, job.seconds[0], job.seconds[0], job.seconds[1], 0.0, job.rests[0], math.inf)
        for job in jobs
    ]
    expected = round_seconds(turns, [(0,)] * len(jobs), shared=False)
    moments = islice(roll_forward(jobs, ROUND_ROBIN, math.inf), 60 * len(jobs))
    ends = [now for now, ended, _ in moments if jobs[0] in ended and jobs[0].phase == ROLLOUT]
    rounds = len(ends) // 2
    assert (ends[-1] - ends[-1 - rounds]) / rounds == pytest.approx(expected, rel=0.02)


@given(groups(), st.integers(0, 20))
def test_where_an_order_leads_does_not_depend_on_when_one_asks(jobs: list[PhasedJob], moment: int) -> None:
    """But for tails: that a running rollout needs its workers no more soon is known when it starts only."""

    def names(jobs: Iterable[PhasedJob]) -> list[str]:
        return sorted(job.name for job in jobs)

    def told(moments: Iterable[Moment]) -> list[tuple[float, list[str], list[str]]]:
        return [(now, names(ended), names(starts)) for now, ended, starts in moments]

    for job in jobs:
        job.holds = job.seconds
    whole = told(roll_forward([job.copy() for job in jobs], AS_READY, math.inf))
    before = told(islice(roll_forward(jobs, AS_READY, math.inf), moment + 1))
    assert before == whole[: moment + 1]
    left = [job for job in jobs if job.steps]
    assert told(roll_forward(left, AS_READY, math.inf, before[-1][0]))[1:] == whole[moment + 1 :]


@given(groups(), orders, st.floats(0.0, 400.0))
def test_it_stops_at_a_time(jobs: list[PhasedJob], order: Order, until: float) -> None:
    whole = [now for now, _, _ in roll_forward([job.copy() for job in jobs], order, math.inf)]
    assert [now for now, _, _ in roll_forward(jobs, order, until)] == [now for now in whole if now <= until]


def test_a_worker_is_kept_free_for_a_job_that_comes_soon_and_cannot_wait() -> None:
    """`b` waits for 10 s, though the worker is free, since `a` would be late if it had to wait for 300."""
    a = PhasedJob("a", 0, (20.0, 30.0), (20.0, 30.0), (1, 8), 60.0, 60.0)
    b = PhasedJob("b", 1, (100.0, 300.0), (100.0, 300.0), (2, 8), 1000.0, 1000.0, phase=1)
    a.begin(0.0)
    starts = [(now, job.name) for now, _, begun in roll_forward([a, b], BY_NEED, 50.0, 10.0) for job in begun]
    assert starts == [(20.0, "a"), (50.0, "a"), (50.0, "b")]
    b.since, b.ends, b.held, b.phase = 10.0, None, 0, 1
    assert [job.name for _, _, begun in roll_forward([b], BY_NEED, 50.0, 10.0) for job in begun] == ["b"]
