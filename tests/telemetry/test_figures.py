"""Each figure has one definition, and every output shows it: runs of which all times are known."""

import io
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import Event, at, ran, run_folder

from jigsawrl.telemetry.figures import Life
from jigsawrl.telemetry.logreader import read_run
from jigsawrl.telemetry.report import ReportTable
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.runreport import run_report
from jigsawrl.telemetry.summary import SummaryTable

TOKENS = 100
"""Of each step."""


def steps(pipeline: str, first: int, last: int, t: float) -> list[Event]:
    """Steps of a second each, from this time on."""
    made = []
    for step in range(first, last + 1):
        end = t + step - first + 1
        made.append(ran("decode", pipeline, 0, step, end - 1, end, tokens=7))  # the metrics know better
        made.append(at(end, "step", pipeline=pipeline, step=step))
    return made


def write_metrics(folder: Path, last: int) -> None:
    """Rewards 1, 2, 3 ..."""
    folder.mkdir(exist_ok=True)
    rows = [{"step": step, "reward/mean": step, "perf/tokens": TOKENS} for step in range(1, last + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def single(folder: Path, events: Iterable[Event], last: int) -> Path:
    run_folder(folder, events)
    write_metrics(folder, last)
    return folder


def printed(what: object) -> str:
    console = Console(file=io.StringIO(), width=100, _environ={})
    console.print(what)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def assert_all_say(run: Path, seconds: float, tokens: int) -> None:
    """The closing table, the report, its page and its JSON, of a run with one pipeline."""
    made = run_report(run)
    (summary,) = made.log.summaries.values()
    (pipeline,) = made.as_dict()["report"]["pipelines"]
    for found in (summary.as_dict(), made.report.as_dict(), pipeline):
        assert found["seconds"] == pytest.approx(seconds)
        assert found["tokens"] == tokens
        assert found["tokens_per_second"] == pytest.approx(tokens / seconds)
    said = f"{tokens:,} generated, {tokens / seconds:,.0f} a second"
    assert said in printed(SummaryTable(summary, "a", run))
    assert said in printed(ReportTable(made.report, "a"))
    assert f"{tokens / seconds:,.0f} tokens/s" in printed(ReportTable(made.report, "a"))
    made.write()
    assert f"<b>{tokens / seconds:,.0f}</b><span>tokens a second</span>" in made.page.read_text()


def test_the_time_in_which_a_run_was_down_after_ctrl_c_counts_nowhere(tmp_path: Path) -> None:
    events = [
        at(0, "start", pipeline="a", step=0),
        *steps("a", 1, 5, 0),
        at(5, "interrupted", pipeline="a", step=5),
        at(1005, "resume", pipeline="a", step=5),
        *steps("a", 6, 10, 1005),
        at(1010, "finished", pipeline="a", step=10),
    ]
    assert_all_say(single(tmp_path, events, 10), 10.0, 10 * TOKENS)


def test_a_step_that_was_lost_to_a_kill_has_taken_time_and_its_tokens_count_once(tmp_path: Path) -> None:
    events = [
        at(0, "start", pipeline="a", step=0),
        *steps("a", 1, 5, 0),
        at(1005, "resume", pipeline="a", step=3),
        *steps("a", 4, 10, 1005),
        at(1012, "finished", pipeline="a", step=10),
    ]
    assert_all_say(single(tmp_path, events, 10), 12.0, 10 * TOKENS)


def test_what_a_run_does_after_its_last_step_is_time_of_it(tmp_path: Path) -> None:
    events = [
        at(0, "start", pipeline="a", step=0),
        *steps("a", 1, 5, 0),
        at(10, "finished", pipeline="a", step=5),  # a checkpoint, and the model
    ]
    assert_all_say(single(tmp_path, events, 5), 10.0, 5 * TOKENS)


def test_to_resume_what_has_finished_changes_no_figure(tmp_path: Path) -> None:
    events = [
        at(0, "start", pipeline="a", step=0),
        *steps("a", 1, 5, 0),
        at(5, "finished", pipeline="a", step=5),
        at(1005, "resume", pipeline="a", step=5),
        at(1007, "finished", pipeline="a", step=5),
    ]
    assert_all_say(single(tmp_path, events, 5), 5.0, 5 * TOKENS)


def test_a_live_run_has_the_figures_of_its_steps_so_far(tmp_path: Path) -> None:
    events = [at(0, "start", pipeline="a", step=0), *steps("a", 1, 5, 0)]
    assert_all_say(single(tmp_path, events, 5), 5.0, 5 * TOKENS)


def test_steps_that_were_made_in_another_run_folder_count_there(tmp_path: Path) -> None:
    """A cluster moves a job, with its metrics, from run to run."""
    events = [
        at(0, "start", workers=1, pipelines=["a"]),
        at(1, "arrived", pipeline="a", step=50),
        at(1, "predicted", pipeline="a", phase="rollout", step=51, seconds=1.0),
        *steps("a", 51, 60, 1),
        at(11, "finished", pipeline="a", step=60, reason=""),
        at(12, "end"),
    ]
    run = run_folder(tmp_path, events)
    write_metrics(run / "a", 60)
    assert_all_say(run, 10.0, 10 * TOKENS)
    assert len(read_run(run).rewards["a"]) == 60


MIX = [
    at(0, "start", workers=1, pipelines=["a", "b"]),
    at(4, "arrived", pipeline="a", step=0),
    at(5, "arrived", pipeline="b", step=0),
    at(5, "predicted", pipeline="a", phase="rollout", step=1, seconds=1.0),
    *steps("a", 1, 10, 5),
    *steps("b", 1, 10, 5),
    at(15, "submitted", pipeline="late"),
    at(18, "arrived", pipeline="late", step=0),
    *steps("a", 11, 15, 15),
    at(19, "pause", pipeline="b", step=10),
    *steps("late", 1, 2, 18),
]
KILLED_AND_RESUMED = [
    *MIX,
    at(1000, "resume", workers=1, pipelines=["a", "b", "late"]),
    *(at(1004, "resume", pipeline=name, step=step) for name, step in (("a", 15), ("b", 10), ("late", 2))),
    *(at(1004, "arrived", pipeline=name, step=step) for name, step in (("a", 15), ("b", 10), ("late", 2))),
    at(1005, "predicted", pipeline="a", phase="rollout", step=16, seconds=1.0),
    *steps("a", 16, 20, 1005),
    at(1010, "finished", pipeline="a", step=20, reason=""),
    *steps("late", 3, 10, 1005),
    at(1013, "finished", pipeline="late", step=10, reason=""),
    at(1013, "pause", pipeline="b", step=10),
    at(1023, "resume", pipeline="b", step=10),
    *steps("b", 11, 20, 1023),
    at(1033, "finished", pipeline="b", step=20, reason=""),
    at(1034, "end"),
]


def mix(folder: Path, events: Iterable[Event], **made: int) -> Path:
    run = run_folder(folder, events)
    for name, last in made.items():
        write_metrics(run / name, last)
    return run


def lives(log: RunLog) -> dict[str, Life]:
    """From the start of the run."""
    return {
        name: Life(
            life.arrived - log.start,
            life.ended - log.start,
            tuple((t0 - log.start, t1 - log.start) for t0, t1 in life.pauses),
        )
        for name, life in log.lives.items()
    }


def test_a_pipeline_counts_from_its_arrival_to_its_end_without_pauses_and_without_outages(
    tmp_path: Path,
) -> None:
    """The run's clock: 15 s until the kill, then on from the first phase after the resume."""
    made = run_report(mix(tmp_path, KILLED_AND_RESUMED, a=20, b=20, late=10))
    assert lives(made.log) == {
        "a": Life(0, 20),
        "b": Life(0, 43, ((14, 15), (23, 33))),
        "late": Life(13, 23),
    }
    assert {each.name: (each.seconds, each.tokens) for each in made.report.pipelines} == {
        "a": (20, 20 * TOKENS),
        "b": (32, 20 * TOKENS),
        "late": (10, 10 * TOKENS),
    }
    assert {name: one.tokens_per_second for name, one in made.log.summaries.items()} == {
        each.name: each.tokens_per_second for each in made.report.pipelines
    }
    assert (made.report.seconds, made.report.tokens) == (43, 50 * TOKENS)
    assert made.report.pipelines[1].waiting == pytest.approx(12 / 32)  # but for the pauses


def test_a_resume_that_dies_while_it_is_set_up_takes_no_time(tmp_path: Path) -> None:
    again = [
        at(500, "resume", workers=1, pipelines=["a", "b", "late"]),
        at(504, "resume", pipeline="a", step=15),
        at(504, "arrived", pipeline="a", step=15),
    ]
    events = [*MIX, *again, *KILLED_AND_RESUMED[len(MIX) :]]
    made = run_report(mix(tmp_path, events, a=20, b=20, late=10))
    assert made.report.seconds == 43
    assert [(round(one.t - made.log.start), one.event) for one in made.log.incidents] == [(15, "killed")] * 2


def test_who_finished_before_a_resume_does_not_finish_again(tmp_path: Path) -> None:
    events = [
        *KILLED_AND_RESUMED,
        at(2000, "resume", workers=1, pipelines=["a", "b", "late"]),
        *(at(2004, "arrived", pipeline=name, step=20) for name in ("a", "b", "late")),
        *(at(2005, "finished", pipeline=name, step=20, reason="") for name in ("a", "b", "late")),
        at(2006, "end"),
    ]
    made = run_report(mix(tmp_path, events, a=20, b=20, late=10))
    assert {each.name: each.seconds for each in made.report.pipelines} == {"a": 20, "b": 32, "late": 10}
    assert (made.report.seconds, made.log.incidents[1:]) == (43, [])


def test_more_steps_for_one_that_had_finished_are_time_of_it(tmp_path: Path) -> None:
    events = [
        *KILLED_AND_RESUMED,
        at(2000, "resume", workers=1, pipelines=["a", "b", "late"]),
        *(at(2004, "arrived", pipeline=name, step=20) for name in ("a", "b", "late")),
        *(at(2005, "finished", pipeline=name, step=20, reason="") for name in ("b", "late")),
        at(2006, "predicted", pipeline="a", phase="rollout", step=21, seconds=1.0),
        *steps("a", 21, 27, 2006),
        at(2013, "finished", pipeline="a", step=27, reason=""),
        at(2014, "end"),
    ]
    made = run_report(mix(tmp_path, events, a=27, b=20, late=10))
    assert {each.name: each.seconds for each in made.report.pipelines} == {"a": 50, "b": 32, "late": 10}
    assert made.report.seconds == 50


@pytest.mark.parametrize(("count", "window"), [(1, 1), (7, 1), (30, 2), (55, 3), (400, 10)])
def test_the_last_reward_is_the_same_mean_in_the_table_the_page_and_the_json(
    tmp_path: Path, count: int, window: int
) -> None:
    events = [
        at(0, "start", pipeline="a", step=0),
        *steps("a", 1, count, 0),
        at(count, "finished", pipeline="a", step=count),
    ]
    made = run_report(single(tmp_path, events, count))
    last = sum(range(count - window + 1, count + 1)) / window
    (summary,) = made.log.summaries.values()
    (pipeline,) = made.as_dict()["report"]["pipelines"]
    for found in (summary.as_dict(), pipeline):
        assert (found["reward_first"], found["reward_last"]) == (1, last)
    made.write()
    assert f"1.000 → {last:.3f}" in made.page.read_text() or f"1.000 → {last:.1f}" in made.page.read_text()
