import io
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jigsawrl.telemetry.columns import to_columns
from jigsawrl.telemetry.events import SUBSTAGES
from jigsawrl.telemetry.figures import Life
from jigsawrl.telemetry.report import CAUSES, Report, ReportTable, report, worker_times
from jigsawrl.telemetry.timeline import WAITS, Span

WORKERS = 3


def bubbles(found: Report) -> list[dict[str, float]]:
    """For each worker its causes that are not nothing."""
    return [{cause: s for cause, s in worker.bubbles.items() if s} for worker in found.workers]


@st.composite
def any_spans(draw: st.DrawFn) -> list[Span]:
    def span() -> Span:
        t0 = draw(st.integers(0, 20))
        return Span(
            draw(st.sampled_from(SUBSTAGES)),
            draw(st.sampled_from("abc")),
            tuple(sorted(draw(st.sets(st.integers(0, WORKERS - 1))))),
            draw(st.integers(1, 3)),
            t0,
            t0 + draw(st.integers(0, 5)),
            draw(st.sampled_from([0.25, 0.5, 1.0])),
        )

    return [span() for _ in range(draw(st.integers(0, 15)))]


def cause_at(spans: list[Span], worker: int, t: float) -> str:
    """The definition, read aloud for one moment."""
    running = [span for span in spans if span.t0 <= t < span.t1]
    here = {span.substage for span in running if worker in span.workers} - WAITS
    users = {span.pipeline for span in spans if worker in span.workers and span.substage not in WAITS}
    theirs = {span.substage for span in running if span.pipeline in users}
    if here - {"sync", "swap"}:
        return "busy"
    for cause, holds in [
        ("sync", "sync" in here),
        ("swap", "swap" in here),
        ("tail", "tail" in theirs),
        ("tool", theirs & WAITS),
        ("dependency", any(t < span.t1 for span in spans)),
    ]:
        if holds:
            return cause
    return "empty queue"


def test_a_tail_on_one_worker_is_why_the_others_are_idle() -> None:
    spans = [
        Span("decode", "a", (0, 1), 1, 0, 4),
        Span("tail", "a", (0,), 1, 4, 9),
        Span("grad", "a", (0, 1), 1, 9, 10),
    ]
    found = report(spans, 2)
    assert (found.seconds, found.busy) == (10, 15)
    assert bubbles(found) == [{}, {"tail": 5}]
    assert [worker.busy for worker in found.workers] == [1.0, 0.5]


def test_a_tail_of_a_pipeline_that_never_comes_here_is_no_reason() -> None:
    spans = [Span("tail", "a", (0,), 1, 0, 4), Span("decode", "b", (1,), 1, 0, 1)]
    assert bubbles(report(spans, 2)) == [{}, {"dependency": 3}]


def test_tools_and_rewards_occupy_no_worker_and_are_waited_for() -> None:
    spans = [
        Span("decode", "a", (0,), 1, 0, 2),
        Span("tool", "a", (0,), 1, 1, 5),
        Span("decode", "a", (0,), 1, 5, 6),
        Span("reward", "a", (0,), 1, 6, 7),
        Span("grad", "a", (0,), 1, 7, 8),
    ]
    assert bubbles(report(spans, 1)) == [{"tool": 4}]


def test_syncs_and_swaps_are_bubbles_unless_something_useful_runs_beside_them() -> None:
    spans = [
        Span("swap", "b", (0,), 1, 0, 2),
        Span("sync", "a", (0,), 1, 1, 3),
        Span("decode", "b", (0,), 1, 2.5, 5),
    ]
    found = report(spans, 1)
    assert bubbles(found) == [{"sync": 1.5, "swap": 1}]
    assert found.workers[0].occupied == 1


def test_a_gap_within_a_pipeline_is_a_dependency_and_one_before_it_arrives_an_empty_queue() -> None:
    spans = [
        Span("decode", "a", (0,), 1, 10, 12),
        Span("grad", "a", (0,), 1, 13, 14),
        Span("decode", "b", (0,), 1, 20, 21),
    ]
    assert bubbles(report(spans, 1)) == [{"dependency": 7}]
    found = report(spans, 1, start=8, end=25, lives={"a": Life(9, 14), "b": Life(19, 21)})
    assert bubbles(found) == [{"dependency": 3, "empty queue": 10}]
    assert (found.start, found.seconds) == (8, 17)


def test_pipelines_are_told_by_their_steps_their_tokens_and_where_their_time_went() -> None:
    spans = [
        Span("prefill", "b", (0,), 1, 102, 103, fields={"tokens": 1000}),
        Span("decode", "b", (0,), 1, 103, 105, fields={"tokens": 30}),
        Span("decode", "b", (1,), 1, 104, 106, fields={"tokens": 10}),
        Span("tail", "b", (0,), 2, 110, 112, fields={"tokens": 2}),
        Span("grad", "a", (0,), 7, 100, 101),
    ]
    a, b = report(spans, 2).pipelines
    assert (a.name, a.steps, a.first, a.last, a.tokens, a.kinds) == ("a", 1, 0, 1, 0, {"grad": 1.0})
    assert (b.name, b.steps, b.first, b.last, b.tokens) == ("b", 2, 2, 12, 42)
    assert (b.seconds_per_step, b.tokens_per_second) == (5, 4.2)
    assert b.kinds == pytest.approx({"prefill": 0.1, "decode": 0.3, "tail": 0.2})
    assert b.waiting == pytest.approx(0.4)


def test_the_share_that_is_taken_is_at_most_all_of_a_worker() -> None:
    spans = [
        Span("tail", "a", (0,), 1, 0, 4, 0.25),
        Span("grad", "b", (0,), 1, 2, 4, 0.5),
        Span("decode", "a", (1,), 1, 0, 2, 1.0),
        Span("decode", "b", (1,), 1, 0, 2, 1.0),
    ]
    assert [worker.occupied for worker in report(spans, 2).workers] == [0.5, 0.5]


def test_a_run_without_spans_has_a_report_too() -> None:
    found = report([], 2)
    assert (found.seconds, found.busy_fraction, found.tokens_per_second) == (0, 0, None)
    assert bubbles(report([], 2, start=5, end=8)) == [{"empty queue": 3}, {"empty queue": 3}]


def test_a_worker_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="workers 3 to 3, and there are 2"):
        report([Span("grad", "a", (3,), 1, 0, 1)], 2)


@given(any_spans())
def test_every_second_is_busy_or_a_bubble_of_the_cause_that_the_definition_gives(spans: list[Span]) -> None:
    found = report(spans, WORKERS)
    start = round(found.start)
    expected = [dict.fromkeys(("busy", *CAUSES), 0.0) for _ in range(WORKERS)]
    for worker in range(WORKERS):
        for second in range(round(found.seconds)):
            expected[worker][cause_at(spans, worker, start + second)] += 1
    assert [{"busy": worker.busy * found.seconds, **worker.bubbles} for worker in found.workers] == [
        pytest.approx(causes) for causes in expected
    ]
    assert found.busy + sum(found.bubbles.values()) == pytest.approx(WORKERS * found.seconds)


@given(
    st.lists(
        st.builds(
            lambda kind, name, worker, t0, long, share: Span(kind, name, (worker,), 1, t0, t0 + long, share),
            st.sampled_from(SUBSTAGES),
            st.sampled_from("abc"),
            st.integers(0, WORKERS - 1),
            st.floats(1.7e9, 1.7e9 + 100),
            st.floats(0, 50),
            st.floats(0, 1),
        ),
        max_size=30,
    )
)
def test_busy_and_bubbles_add_up_to_the_time_of_all_workers(spans: list[Span]) -> None:
    found = report(spans, WORKERS)
    assert found.busy + sum(found.bubbles.values()) == pytest.approx(WORKERS * found.seconds, abs=1e-9)
    assert all(0 <= worker.busy <= 1 + 1e-9 and 0 <= worker.occupied <= 1 + 1e-9 for worker in found.workers)
    for times in worker_times(to_columns(spans, WORKERS)):
        every = np.concatenate(list(times.values()))
        every = every[np.argsort(every[:, 0])]
        assert (every[1:, 0] == every[:-1, 1]).all()


def many(count: int, workers: int = 16, pipelines: int = 8) -> list[Span]:
    rng = np.random.default_rng(0)
    t0 = np.sort(rng.uniform(0, 10_000, count)).tolist()
    kinds, who, where = (rng.integers(0, n, count).tolist() for n in (len(SUBSTAGES), pipelines, workers))
    return [
        Span(SUBSTAGES[k], f"p{p}", (w,), int(t // 50), t, t + 0.2, 0.5, {"tokens": 10})
        for k, p, w, t in zip(kinds, who, where, t0, strict=True)
    ]


@pytest.mark.slow
def test_half_a_million_spans_take_seconds() -> None:
    spans = many(500_000)
    began = time.process_time()
    found = report(spans, 16)
    assert time.process_time() - began < 5
    assert found.busy + sum(found.bubbles.values()) == pytest.approx(found.worker_seconds)


def test_for_machines_the_report_is_json() -> None:
    found = json.loads(
        json.dumps(report([Span("tail", "a", (0,), 1, 0, 4, fields={"tokens": 8})], 1).as_dict())
    )
    assert found["pipelines"][0]["tokens_per_second"] == 2
    assert found["workers"][0] == {"worker": 0, "busy": 1, "occupied": 1, "bubbles": dict.fromkeys(CAUSES, 0)}


def shown(found: Report, encoding: str = "utf-8") -> list[list[str]]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=100, _environ={}).print(ReportTable(found, "two jobs"))
    file.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    rule = "|" if encoding == "ascii" else "│"
    return [
        [cell.strip() for cell in line.strip(rule).split(rule)] for line in lines if line.startswith(rule)
    ]


TWO_JOBS = [
    Span("decode", "long", (0, 1), 1, 0, 4, fields={"tokens": 400}),
    Span("tail", "long", (0,), 1, 4, 8, fields={"tokens": 40}),
    Span("grad", "short", (1,), 1, 5, 6),
    Span("grad", "long", (0, 1), 1, 8, 10),
]


def test_the_table_tells_how_long_it_took_and_where_the_gaps_are() -> None:
    assert shown(report(TWO_JOBS, 2)) == [
        ["time", "10.0 s"],
        ["tokens", "440 generated, 44 a second"],
        ["pipelines", "long   1 step   10.0 s/step  44 tokens/s  decode 40%, tail 40%, grad 20%"],
        ["", "short  1 step  1.000 s/step               grad 100%"],
        ["workers", "0  100% busy  ████████████████"],
        ["", "1   70% busy  ███████████"],
        ["bubbles", "tail  15.0%  ██"],
    ]


def test_of_many_workers_the_table_shows_the_extremes() -> None:
    rows = shown(report(TWO_JOBS, 10))
    assert [row[1].split("  ")[0] for row in rows[4:7]] == ["least", "mean of 10", "most"]


def test_a_terminal_that_knows_only_ascii_gets_the_same_report() -> None:
    assert ["bubbles", "tail  15.0%  ##"] in shown(report(TWO_JOBS, 2), "ascii")


def test_a_report_of_nothing_has_a_table() -> None:
    assert shown(report([], 2)) == [["time", "0.00 s"]]
