import json
from pathlib import Path

import pytest
from run_folders import Event, T, at, ran, run_folder, two_pipelines

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import FLOAT32_MAX
from jigsawrl.telemetry.logreader import read_run
from jigsawrl.telemetry.runlog import Incident, Outage, Prediction
from jigsawrl.telemetry.runreport import run_report, write_report
from jigsawrl.underway import under_way


def test_a_log_is_read_as_spans_steps_incidents_and_predictions(tmp_path: Path) -> None:
    log = read_run(run_folder(tmp_path, two_pipelines(), {"sums": [0.25], "<search>": [0.5]}))
    assert (log.name, log.workers, log.start, log.end) == ("night", 2, T, T + 10)
    assert [(span.substage, span.workers) for span in log.spans] == [
        *(("decode", (0,)), ("decode", (1,)), ("tail", (0,)), ("grad", (0,))),
        *(("tool", (1,)), ("grad", (0,)), ("grad", (1,))),
    ]
    assert log.done == {"<search>": {1: T + 8}, "sums": {1: T + 10}}
    assert log.rewards == {"<search>": [(1, 0.5)], "sums": [(1, 0.25)]}
    assert log.predictions == [Prediction("sums", "rollout", 1, 4.0, 5.0)]
    assert log.incidents == [
        Incident(T + 6, "<search>", "died", "actor of worker 1: signal 9 & no more"),
        Incident(T + 7, "<search>", "recovered", "step 1"),
    ]
    assert [(one.failure, one.recovery) for one in log.incidents] == [(True, False), (False, True)]
    assert (log.solo, dict(log.actions), log.simulated) == ({"sums": 4.0}, {"start": 1}, False)


def test_the_only_pipelines_metrics_lie_in_the_run_folder_itself(tmp_path: Path) -> None:
    events = [at(0, "start", pipeline="sums", step=0), ran("grad", "sums", 0, 1, 0, 1)]
    assert read_run(run_folder(tmp_path, events, {"": [0.5, None, 0.75]})).rewards == {
        "sums": [(1, 0.5), (3, 0.75)]
    }


def test_a_step_that_was_repeated_counts_when_it_was_done_last(tmp_path: Path) -> None:
    events = [at(1, "step", pipeline="a", step=1), at(9, "step", pipeline="a", step=1)]
    assert read_run(run_folder(tmp_path, events)).done == {"a": {1: T + 9}}


def test_a_phase_is_held_against_the_newest_prediction_of_it(tmp_path: Path) -> None:
    phase = {"pipeline": "a", "phase": "training", "step": 2}
    events = [
        at(0, "predicted", **phase, seconds=1.0),
        at(5, "predicted", **phase, seconds=2.0),
        at(8, "phase", **phase, t0=T + 5, t1=T + 8),
        at(9, "phase", **phase, t0=T + 8, t1=T + 9),
    ]
    assert read_run(run_folder(tmp_path, events)).predictions == [Prediction("a", "training", 2, 2.0, 3.0)]


def test_the_time_in_which_a_run_was_down_is_cut_out(tmp_path: Path) -> None:
    events = [
        at(0, "start", pipeline="a", step=0),
        ran("grad", "a", 0, 1, 0, 10),
        at(3610, "resume", pipeline="a", step=0),
        ran("grad", "a", 0, 1, 3611, 3620),
        at(3620, "step", pipeline="a", step=1),
        at(3620, "finished", pipeline="a", step=1),
    ]
    log = read_run(run_folder(tmp_path, events))
    assert [(span.t0 - T, span.t1 - T) for span in log.spans] == [(0, 10), (11, 20)]
    assert (log.done, log.end) == ({"a": {1: T + 20}}, T + 20)
    assert log.outages == [Outage(T + 10, 3600)]
    assert [(one.t - T, one.event) for one in log.incidents] == [(10, "killed")]


def test_a_pipeline_that_resumes_while_another_runs_stops_no_clock(tmp_path: Path) -> None:
    events = [
        ran("grad", "a", 0, 1, 0, 10),
        at(3610, "resume", pipeline="a", step=0),
        ran("decode", "b", 1, 1, 0, 4000),
    ]
    log = read_run(run_folder(tmp_path, events))
    assert (log.outages, log.end) == ([], T + 4000)


def test_a_pipeline_that_recovers_in_a_run_that_goes_on_stops_no_clock(tmp_path: Path) -> None:
    """Nothing ran while it was made anew, and that is a bubble."""
    events = [
        at(0, "start", workers=1, pipelines=["a"]),
        at(2, "arrived", pipeline="a", step=0),
        ran("grad", "a", 0, 1, 2, 10),
        at(10, "died", pipeline="a", reason="signal 9"),
        at(30, "resume", pipeline="a", step=0),
        at(30, "recovered", pipeline="a", step=0),
        ran("grad", "a", 0, 1, 30, 40),
        at(3640, "resume", workers=1, pipelines=["a"]),
        at(3645, "resume", pipeline="a", step=1),
    ]
    log = read_run(run_folder(tmp_path, events))
    assert log.outages == [Outage(T + 40, 3600)]
    assert (log.end, log.arrivals) == (T + 45, {"a": T + 2})


def test_a_scheduled_run_starts_with_its_first_prediction_and_what_was_before_is_set_up(
    tmp_path: Path,
) -> None:
    events = [
        at(0, "start", workers=1, pipelines=["a", "b"]),
        at(4, "died", pipeline="b", reason="signal 9"),
        at(5, "arrived", pipeline="a", step=0),
        at(6, "arrived", pipeline="b", step=0),
        at(7, "predicted", pipeline="a", phase="rollout", step=1, seconds=1.0),
        ran("decode", "a", 0, 1, 7.5, 9),
        at(9, "predicted", pipeline="b", phase="rollout", step=1, seconds=1.0),
        at(10, "finished", pipeline="a", step=1),
        at(12, "failed", pipeline="b", step=0, reason="no"),
    ]
    log = read_run(run_folder(tmp_path, events))
    assert (log.setup, log.start - T, log.end - T) == (7, 7, 12)
    assert (log.began, log.ended) == ({"a": T + 7, "b": T + 9}, {"a": T + 10, "b": T + 12})
    assert log.arrivals == {"a": T + 7, "b": T + 7}
    assert [one.t - T for one in log.incidents] == [7, 12]


@pytest.mark.parametrize("down", [0.5, 600.0])
def test_the_set_up_after_a_resume_is_no_time_of_the_run_either(down: float, tmp_path: Path) -> None:
    back = 10 + down
    events = [
        at(0, "start", workers=1, pipelines=["a"]),
        at(4, "predicted", pipeline="a", phase="rollout", step=1, seconds=1.0),
        ran("decode", "a", 0, 1, 4, 10),
        at(back, "resume", workers=1, pipelines=["a"]),
        at(back + 5, "resume", pipeline="a", step=1),
        at(back + 5, "arrived", pipeline="a", step=1),
        at(back + 6, "predicted", pipeline="a", phase="rollout", step=2, seconds=1.0),
        ran("decode", "a", 0, 2, back + 6, back + 8),
    ]
    log = read_run(run_folder(tmp_path, events))
    assert (log.setup, log.start - T, log.end - T) == (4, 4, 12)
    assert log.outages == [Outage(T + 10, pytest.approx(down + 6))]
    assert [(span.t0 - T, span.t1 - T) for span in log.spans] == [(4, 10), (10, 12)]


def test_tokens_are_those_of_the_metrics_where_they_are_known(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_pipelines(), {"sums": [0.25], "<search>": [0.5]})
    rows = [{"step": step, "reward/mean": 0.5, "perf/tokens": 450.0} for step in (1, 2)]
    (folder / "sums" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_run(folder)
    assert {name: one.tokens for name, one in log.summaries.items()} == {"sums": 900, "<search>": 0}
    assert {one.name: one.tokens for one in run_report(folder).report.pipelines} == {
        "<search>": 0,
        "sums": 900,
    }


def test_a_sub_stage_that_raised_is_a_failure(tmp_path: Path) -> None:
    log = read_run(run_folder(tmp_path, [ran("grad", "a", 0, 3, 0, 1, error="ValueError")]))
    assert log.incidents == [Incident(T + 1, "a", "error", "grad of step 3 ended with ValueError")]
    assert log.incidents[0].failure


def incidents(folder: Path, events: list[Event]) -> list[tuple[str, str, bool]]:
    """Who, what, and whether it is a failure; those that the page lists come first."""
    log = read_run(run_folder(folder, events))
    return [(one.pipeline, one.event, one.failure) for one in log.incidents]


ONE = [
    at(0, "start", pipeline="a", step=0),
    ran("grad", "a", 0, 1, 0, 1),
    at(1, "step", pipeline="a", step=1),
]
AGAIN = [
    at(100, "resume", pipeline="a", step=1),
    ran("grad", "a", 0, 2, 100, 101),
    at(101, "step", pipeline="a", step=2),
    at(101, "finished", pipeline="a", step=2),
]
INTERRUPTED = at(1, "interrupted", pipeline="a", step=1)
KILLED = ("a", "killed", True)


def test_ctrl_c_is_no_failure_and_a_resume_is_no_recovery(tmp_path: Path) -> None:
    stopped = ("a", "interrupted", False)
    assert incidents(tmp_path / "stopped", [*ONE, INTERRUPTED]) == [stopped]
    assert incidents(tmp_path / "resumed", [*ONE, INTERRUPTED, *AGAIN]) == [stopped]
    page = write_report(tmp_path / "resumed").read_text()
    assert "Nothing failed." in page
    assert "<b>0</b><span>failures</span>" in page
    assert "interrupted at 0:01 · down for 1 min 39 s at 0:01, left out" in page
    assert list(run_report(tmp_path / "resumed").failures()) == []


def test_a_second_ctrl_c_breaks_a_sub_stage_off_and_that_is_no_failure_either(tmp_path: Path) -> None:
    broken = ran("grad", "a", 0, 2, 1, 1.5, error="KeyboardInterrupt")
    assert incidents(tmp_path, [*ONE, broken, INTERRUPTED]) == [("a", "interrupted", False)]


def test_a_log_that_just_stops_is_a_failure_whether_or_not_it_goes_on_later(tmp_path: Path) -> None:
    assert incidents(tmp_path / "stopped", ONE) == [KILLED]
    assert incidents(tmp_path / "resumed", [*ONE, *AGAIN]) == [KILLED]
    assert incidents(tmp_path / "twice", [*ONE, *AGAIN[:3]]) == [KILLED, KILLED]
    assert next(run_report(tmp_path / "resumed").notes()) == (
        "0:01 a killed: the process of the run was killed, or its machine went down: the log stops here"
    )
    assert "<b>1</b><span>failure</span>" in write_report(tmp_path / "resumed").read_text()


def test_the_log_of_a_live_run_has_only_not_ended_yet(tmp_path: Path) -> None:
    run_folder(tmp_path, [*ONE, *AGAIN[:3]])
    with under_way(tmp_path):
        assert [one.event for one in read_run(tmp_path).incidents] == ["killed"]  # the first of the two
    assert [one.event for one in read_run(tmp_path).incidents] == ["killed", "killed"]


SEVERAL = [
    at(0, "start", workers=1, pipelines=["a", "b"]),
    at(1, "arrived", pipeline="a", step=0),
    at(1, "arrived", pipeline="b", step=0),
    at(1, "predicted", pipeline="a", phase="rollout", step=1, seconds=1.0),
]


def test_of_several_pipelines_each_that_ctrl_c_stopped_is_told_once(tmp_path: Path) -> None:
    events = [
        *SEVERAL,
        at(2, "interrupted", pipeline="a", step=3),  # its driver says so, and then the scheduler
        at(2.1, "interrupted", pipeline="a", step=3, reason="stopped after step 3; go on with --resume"),
        at(3, "interrupted", pipeline="b", step=4),
        at(3.1, "interrupted", pipeline="b", step=4, reason="stopped after step 4; go on with --resume"),
        at(4, "end"),
    ]
    assert incidents(tmp_path, events) == [("a", "interrupted", False), ("b", "interrupted", False)]


def test_who_was_cancelled_or_paused_and_resumed_by_its_user_is_no_incident(tmp_path: Path) -> None:
    events = [
        *SEVERAL,
        at(2, "pause", pipeline="a", step=3),
        at(3, "resume", pipeline="a", step=3),
        at(4, "cancel", pipeline="a", step=5),
        at(5, "interrupted", pipeline="a", step=6),
        at(5, "cancelled", pipeline="a", step=6, reason="stopped after step 6; go on with --resume"),
        at(6, "finished", pipeline="b", step=9, reason=""),
        at(7, "end"),
    ]
    assert incidents(tmp_path, events) == []


def test_a_run_of_several_that_was_killed_is_one_failure_of_the_run(tmp_path: Path) -> None:
    finished = at(2, "finished", pipeline="a", step=3, reason="")
    assert incidents(tmp_path, [*SEVERAL, finished]) == [("", "killed", True)]
    assert next(run_report(tmp_path).failures()).startswith("0:01 the run killed: ")


def test_a_failure_is_counted_once_though_driver_and_scheduler_log_it(tmp_path: Path) -> None:
    """A driver that has to give up does not know whether it is started again."""
    events = [
        *SEVERAL,
        at(2, "failed", pipeline="a", step=3),
        at(2, "died", pipeline="a", reason="worker 0 died (signal 9)", deaths=1),
        at(3, "resume", pipeline="a", step=3),
        at(3, "recovered", pipeline="a", step=3),
        at(4, "failed", pipeline="b", step=2),
        at(4, "failed", pipeline="b", step=2, reason="no such answer"),
        at(5, "finished", pipeline="a", step=9, reason=""),
        at(6, "end"),
    ]
    assert incidents(tmp_path, events) == [
        ("a", "died", True),
        ("a", "recovered", False),
        ("b", "failed", True),
    ]


def test_whatever_a_reward_function_may_return_can_be_reported(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_pipelines(), {"sums": [1e13, -FLOAT32_MAX]})
    assert read_run(folder).rewards == {"sums": [(1, 1e13), (2, -FLOAT32_MAX)]}
    (reported,) = [each for each in run_report(folder).report.pipelines if each.name == "sums"]
    assert (reported.reward_first, reported.reward_last) == (1e13, -FLOAT32_MAX)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_pipelines(), {"sums": [0.5, 0.75]})
    for path in (folder / "events.jsonl", folder / "sums" / "metrics.jsonl"):
        path.write_bytes(path.read_bytes()[:-9])
    log = read_run(folder)
    assert (len(log.spans), log.rewards) == (7, {"sums": [(1, 0.5)]})


NONSENSE: dict[str, tuple[str, str]] = {
    "no JSON": ("what?", "is not a JSON object; remove that line"),
    "no object": ("[1]", "is not a JSON object; remove that line"),
    "no event": ('{"t": 1}', "is no event of a run: 'event' is missing"),
    "no time": ('{"event": "step"}', "is no event of a run: 't' is missing"),
    "no number": ('{"t": "now", "event": "step"}', "is no event of a run: t is 'now', not a number"),
    "no finite number": ('{"t": NaN, "event": "step"}', "is no event of a run: t is nan, not a number"),
    "no pipeline": ('{"t": 1, "event": "step", "step": 1}', "is no event of a run: 'pipeline' is missing"),
    "a list for a name": (
        '{"t": 1, "event": "step", "pipeline": [], "step": 1}',
        "is no event of a run: pipeline is [], not a text",
    ),
    "an endless step": (
        '{"t": 1, "event": "step", "pipeline": "a", "step": Infinity}',
        "is no event of a run: step is inf, not a number",
    ),
    "no such worker": (
        json.dumps(ran("grad", "a", -1, 1, 0, 1)),
        "is no event of a run: there is no worker (-1,)",
    ),
    "a scene of one number": (
        '{"t": 1, "event": "start", "scene": 3}',
        "is no event of a run: 'int' object has no attribute 'items'",
    ),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_named_with_its_file_and_line(case: str, tmp_path: Path) -> None:
    line, message = NONSENSE[case]
    path = run_folder(tmp_path, two_pipelines()) / "events.jsonl"
    path.write_text(f"{path.read_text()}{line}\n{json.dumps(at(11, 'finished'))}\n")
    with pytest.raises(JigsawError) as raised:
        read_run(tmp_path)
    assert str(raised.value) == f"{path}, line 20 {message}"


def test_nonsense_among_the_metrics_is_named_too(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_pipelines(), {"sums": [0.5]})
    with open(folder / "sums" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward/mean": "high"}\n')
    with pytest.raises(JigsawError, match=r"sums/metrics.jsonl, line 2 is no step's metrics: reward/mean is"):
        read_run(folder)


def test_what_is_no_run_folder_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    run_folder(tmp_path / "early", [])
    said = {}
    for name in ("nowhere", "file", "empty", "early"):
        with pytest.raises(JigsawError) as raised:
            read_run(tmp_path / name)
        said[name] = str(raised.value).removeprefix(f"{tmp_path}/")
    assert said == {
        "nowhere": "nowhere: there is no such run folder",
        "file": "file: is a file, not a run folder",
        "empty": "empty: holds no events.jsonl, so it is not the folder of a run",
        "early": "early/events.jsonl: holds no event yet",
    }
