import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jigsawrl.cli_compare import learned
from jigsawrl.cli_runs import ended
from jigsawrl.runtime.launch import Ended
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.figures import Summary, summarize
from jigsawrl.telemetry.metrics import Metrics
from jigsawrl.telemetry.summary import SummaryTable
from jigsawrl.telemetry.text import clock, duration, number, sparkline

FINITE = st.floats(-1e6, 1e6)


def run(folder: Path, steps: list[dict[str, float]]) -> Summary:
    with Metrics(folder, tensorboard=False) as metrics:
        for step, values in enumerate(steps, 1):
            metrics.log(step, values)
    return summary_of(folder / "metrics.jsonl")


def summary_of(path: Path) -> Summary:
    """Of a pipeline that did nothing but its steps."""
    rows = [row for _, row in jsonl.read(path)]
    return summarize(rows, math.fsum(row.get("timing_s/step", 0.0) for row in rows))


def shown(summary: Summary, width: int = 80, encoding: str = "utf-8", model: Path | None = None) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, _environ={}).print(
        SummaryTable(summary, "arithmetic", Path("runs/arithmetic"), model)
    )
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


LEARNING = [
    {
        "reward/mean": 0.2 + 0.6 * (step >= 20),
        "response_length/mean": 12.0,
        "perf/tokens": 2000,
        "timing_s/step": 2.0,
        "timing_s/gen": 1.0,
        "timing_s/reward": 0.2,
        "timing_s/update_actor": 0.5,
        "timing_s/my_stage": 0.1,
    }
    for step in range(40)
]


def test_the_table_tells_what_a_run_did_and_where_its_time_went(tmp_path: Path) -> None:
    lines = shown(run(tmp_path, LEARNING), model=Path("runs/arithmetic/model"))
    assert lines[0].strip() == "arithmetic"
    assert cells(lines) == [
        ["reward", "0.200 → 0.800   before training, the last 2 steps"],
        ["", "▁" * 20 + "█" * 20],
        ["steps", "40"],
        ["tokens", "80,000 generated, 1,000 a second (2,000 while generating)"],
        ["time", "1 min 20 s"],
        ["", "generation  40.0 s  50%  ████████"],
        ["", "rewards      8.0 s  10%  ██"],
        ["", "update      20.0 s  25%  ████"],
        ["", "my_stage     4.0 s   5%  █"],
        ["", "other        8.0 s  10%  ██"],
        ["model", "runs/arithmetic/model"],
        ["run folder", "runs/arithmetic"],
    ]
    assert all(len(line) <= 80 for line in lines)


def test_a_terminal_that_knows_only_ascii_gets_the_same_table(tmp_path: Path) -> None:
    lines = shown(run(tmp_path, LEARNING), encoding="ascii")
    assert any("0.200 -> 0.800" in line for line in lines)
    assert any("generation  40.0 s  50%  ########" in line for line in lines)


def test_a_run_without_steps_has_a_table_too(tmp_path: Path) -> None:
    for summary in (summarize([], 0.0), run(tmp_path, [])):
        assert (summary.steps, summary.reward_first, summary.tokens_per_second) == (0, None, None)
        assert cells(shown(summary)) == [["steps", "none was finished"], ["run folder", "runs/arithmetic"]]


def test_a_run_of_one_step_shows_its_reward_once(tmp_path: Path) -> None:
    summary = run(tmp_path, LEARNING[:1])
    assert cells(shown(summary))[:3] == [
        ["reward", "0.200"],
        ["steps", "1"],
        ["tokens", "2,000 generated, 1,000 a second (2,000 while generating)"],
    ]


def test_failed_rewards_samples_left_out_and_numbers_that_are_not_finite_are_in_the_table(
    tmp_path: Path,
) -> None:
    steps = [
        {"reward/mean": 0.5, "reward/errors": 2.0, "reward/none": 1.0, "actor/loss": math.nan}
        for _ in range(3)
    ]
    steps.append({"reward/mean": math.nan})
    summary = run(tmp_path, steps)
    assert (summary.reward_first, summary.reward_last, summary.rewards) == (0.5, None, [0.5] * 3)
    reward, _, *others = cells(shown(summary))
    assert reward == ["reward", "0.500 → ?   before training, the last step"]
    assert others == [
        ["steps", "4"],
        ["errors", "6 rewards failed"],
        ["left out", "3 samples with the reward None"],
        ["not finite", "actor/loss in 3 steps"],
        ["not finite", "reward/mean in 1 step"],
        ["run folder", "runs/arithmetic"],
    ]


def test_the_share_of_cut_off_samples_is_in_the_table_if_it_is_worth_a_line(tmp_path: Path) -> None:
    def table(*shares: float) -> list[list[str]]:
        steps = [{"reward/mean": 0.5, "response_length/clip_ratio": share} for share in shares]
        return cells(shown(run(tmp_path / str(shares), steps)))

    assert ["cut off", "99% of the samples, at the limit of tokens or turns"] in table(1.0, 0.98)
    assert "cut off" not in [row[0] for row in table(0.0, 0.01)]


def test_the_tables_of_several_pipelines_show_the_share_too(tmp_path: Path) -> None:
    for name, share in {"a": 0.75, "b": 0.0}.items():
        summary = run(tmp_path / name, [{"reward/mean": 0.5, "response_length/clip_ratio": share}])
        how = ended(Ended(name, "finished", "", 1, tmp_path / name, 1.0, summary))
        assert how == ("finished; 75% of samples cut off" if share else "finished")


@pytest.mark.parametrize(("share", "heads"), [(0.75, ["last", "cut off"]), (0.0, ["first reward", "last"])])
def test_the_table_of_a_comparison_has_the_share_if_it_is_worth_a_column(
    tmp_path: Path, share: float, heads: list[str]
) -> None:
    steps = {"a": share, "b": 0.0}
    summaries = {
        name: run(tmp_path / name, [{"reward/mean": 0.5, "response_length/clip_ratio": each}])
        for name, each in steps.items()
    }
    log = SimpleNamespace(summaries=summaries)
    best = SimpleNamespace(policy="jigsaw", fates=steps, log=log)
    table = learned(SimpleNamespace(runs=[best], best="jigsaw"))
    assert [str(column.header) for column in table.columns][-2:] == heads
    assert list(table.columns[-1].cells) == (["75%", ""] if share else ["0.500", "0.500"])


@pytest.mark.parametrize(
    ("steps", "window"), [(1, 1), (2, 1), (20, 1), (40, 2), (60, 3), (200, 10), (5000, 10)]
)
def test_the_first_reward_is_that_of_step_one_and_the_last_a_mean_of_one_to_ten_steps(
    tmp_path: Path, steps: int, window: int
) -> None:
    summary = run(tmp_path, [{"reward/mean": step} for step in range(steps)])
    assert summary.window == window
    assert summary.reward_first == 0
    assert summary.reward_last == sum(range(steps - window, steps)) / window


def test_a_summary_of_a_file_that_is_being_written_leaves_out_the_torn_line(tmp_path: Path) -> None:
    run(tmp_path, LEARNING[:3])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":4,"reward/me')
    assert summary_of(tmp_path / "metrics.jsonl").steps == 3


def test_for_machines_the_summary_is_json(tmp_path: Path) -> None:
    summary = json.loads(json.dumps(run(tmp_path, LEARNING).as_dict()))
    assert summary["tokens_per_second"] == pytest.approx(1000)
    assert summary["stages"][0] == {"name": "generation", "seconds": 40.0, "share": 0.5}
    assert "rewards" not in summary


STAGE_TIMES = st.fixed_dictionaries(
    {
        "timing_s/gen": st.floats(0, 10),
        "timing_s/update_actor": st.floats(0, 10),
        "timing_s/x": st.floats(0, 10),
    }
)


@given(st.lists(st.tuples(STAGE_TIMES, st.floats(0.01, 5)), min_size=1, max_size=20))
def test_the_stages_account_for_all_of_the_time(steps: list[tuple[dict[str, float], float]]) -> None:
    whole = math.fsum([*(sum(times.values()) for times, _ in steps), *(rest for _, rest in steps)])
    stages = summarize([times for times, _ in steps], whole).stages
    assert sum(stage.share for stage in stages) == pytest.approx(1, abs=0.011)
    assert all(stage.seconds > 0 for stage in stages)


@given(st.lists(FINITE, max_size=200), st.integers(1, 50))
def test_a_sparkline_is_as_long_as_it_may_be_and_spans_its_range(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set("▁▂▃▄▅▆▇█")
    if set(line) > {"▁"}:
        assert "▁" in line
        assert "█" in line
    assert line == sparkline([*values, math.nan], width)


@given(st.lists(FINITE, min_size=2, max_size=40, unique=True))
def test_a_sparkline_rises_where_the_values_rise(values: list[float]) -> None:
    line = sparkline(sorted(values), 40)
    assert list(line) == sorted(line)


def test_numbers_are_short_and_say_what_matters() -> None:
    values = (0.0, 0.84219, -0.00123, 3.1e-7, 12.34, 4812.3, 2e7, math.nan, -math.inf)
    assert [number(value) for value in values] == [
        "0.000",
        "0.842",
        "-0.0012",
        "3.1e-07",
        "12.3",
        "4,812",
        "2.0e+07",
        "nan",
        "-inf",
    ]


def test_times_read_like_times() -> None:
    assert [duration(seconds) for seconds in (0.004, 0.42, 9.14, 59.97, 92, 7384)] == [
        "0.00 s",
        "0.42 s",
        "9.1 s",
        "1 min 00 s",
        "1 min 32 s",
        "2 h 03 min",
    ]
    assert [clock(seconds) for seconds in (7, 92, 7384)] == ["0:07", "1:32", "2:03:04"]


def test_a_first_step_without_rewards_hides_no_later_ones(tmp_path: Path) -> None:
    steps = [{"reward/none": 16.0}, *[{"reward/mean": 0.5}] * 4]
    lines = shown(run(tmp_path, steps))
    assert any("? → 0.500" in line for line in lines)
    assert not any("reward  " in line for line in shown(run(tmp_path / "none", [{"reward/none": 16.0}] * 2)))
