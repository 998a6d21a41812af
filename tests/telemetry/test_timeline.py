from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.events import SUBSTAGES, EventLog
from jigsawrl.telemetry.timeline import WAITS, Span, chrome_trace, read_spans

RECORD = {
    "event": "substage",
    "substage": "grad",
    "pipeline": "a",
    "worker": 2,
    "step": 4,
    "t0": 1.0,
    "t1": 2.0,
}

STEP = [
    Span("prefill", "a", (0,), 1, 100.0, 100.5, fields={"tokens": 900}),
    Span("decode", "a", (0,), 1, 100.5, 102.0, 0.75, {"tokens": 60}),
    Span("tool", "a", (0,), 1, 101.0, 103.0),
    Span("tool", "a", (0,), 1, 102.5, 103.5),
    Span("grad", "a", (0, 1), 1, 103.5, 104.0),
    Span("swap", "b", (0,), 1, 104.0, 104.25),
]


def slices(trace: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """(process, track, name, seconds, seconds) of everything that is drawn."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    return [
        (
            names["process_name", event["pid"], 0],
            names["thread_name", event["pid"], event["tid"]],
            event["name"],
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


@st.composite
def any_spans(draw: st.DrawFn) -> list[Span]:
    def span() -> Span:
        t0 = draw(st.integers(0, 20))
        return Span(
            draw(st.sampled_from(SUBSTAGES)),
            draw(st.sampled_from("ab")),
            tuple(sorted(draw(st.sets(st.integers(0, 2), min_size=1)))),
            draw(st.integers(1, 2)),
            t0,
            t0 + draw(st.integers(0, 5)),
        )

    return [span() for _ in range(draw(st.integers(0, 20)))]


def test_what_a_log_recorded_is_read_back_as_spans(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("start", pipeline="a")
        log.record("decode", pipeline="a", worker=1, step=3, t0=10.0, t1=12.5, tokens=7, share=0.25)
        log.emit("step", pipeline="a", step=3)
    assert read_spans(record for _, record in jsonl.read(tmp_path / "events.jsonl")) == [
        Span("decode", "a", (1,), 3, 10.0, 12.5, 0.25, {"tokens": 7})
    ]


def test_a_span_may_be_on_several_workers_or_on_none() -> None:
    nowhere = {name: value for name, value in RECORD.items() if name != "worker"}
    spans = read_spans([RECORD, {**RECORD, "workers": [1, 0, 1]}, nowhere])
    assert [span.workers for span in spans] == [(2,), (0, 1), ()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t1": 0.5}, "cannot last from 1.0 to 0.5"),
        ({"t1": None}, "sub-stage that is none"),
        ({"share": 1.5}, "a share is between 0 and 1, not 1.5"),
        ({"substage": "sleep"}, "'sleep' is not a sub-stage"),
    ],
)
def test_a_record_that_is_no_sub_stage_is_shown_with_what_is_wrong(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(JigsawError, match=message):
        read_spans([{**RECORD, **change}])


def test_a_record_that_lacks_something_says_what() -> None:
    with pytest.raises(JigsawError, match="a sub-stage without 'step'"):
        read_spans([{name: value for name, value in RECORD.items() if name != "step"}])


def test_a_trace_shows_the_stages_of_pipelines_and_what_workers_do() -> None:
    assert slices(chrome_trace(STEP)) == [
        ("pipelines", "a", "rollout 1", 0.0, 3.5),
        ("pipelines", "a", "update 1", 3.5, 4.0),
        ("pipelines", "a: waits", "tool", 1.0, 3.5),
        ("worker 0", "a", "prefill", 0.0, 0.5),
        ("worker 0", "a", "decode", 0.5, 2.0),
        ("worker 0", "a", "grad", 3.5, 4.0),
        ("worker 0", "b", "swap", 4.0, 4.25),
        ("worker 1", "a", "grad", 3.5, 4.0),
    ]


def test_a_slice_says_its_step_share_and_tokens() -> None:
    found = {event["name"]: event for event in chrome_trace(STEP)["traceEvents"] if event["ph"] == "X"}
    assert found["decode"]["args"] == {"step": 1, "share": 0.75, "tokens": 60}
    assert found["rollout 1"]["args"] == {"step": 1, "spans": 4, "tokens": 60}
    assert found["decode"]["cname"] != found["grad"]["cname"]


def test_spans_of_one_pipeline_that_overlap_on_a_worker_get_a_second_track_of_its_name() -> None:
    spans = [Span("decode", "a", (0,), 1, t0, t0 + 2) for t0 in (0.0, 1.0, 2.0)]
    events = [event for event in chrome_trace(spans)["traceEvents"] if event["name"] == "decode"]
    assert [event["tid"] for event in events] == [events[0]["tid"], events[1]["tid"], events[0]["tid"]]
    assert {name for process, name, *_ in slices(chrome_trace(spans)) if process == "worker 0"} == {"a"}


@given(any_spans())
def test_every_span_is_on_each_of_its_workers_and_no_track_overlaps(spans: list[Span]) -> None:
    trace = chrome_trace(spans)
    drawn = [piece for piece in slices(trace) if piece[0] != "pipelines"]
    start = min((span.t0 for span in spans), default=0)
    assert sorted(drawn) == sorted(
        (f"worker {worker}", span.pipeline, span.substage, span.t0 - start, span.t1 - start)
        for span in spans
        if span.substage not in WAITS
        for worker in span.workers
    )
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert all(a[1] <= b[0] for pieces in tracks.values() for a, b in pairwise(pieces))


def test_a_run_without_spans_has_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []
