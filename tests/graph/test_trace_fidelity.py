"""The benchmark judges any folder of traces, and says so where it cannot."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_traces import STEP
from verl_logs import COMMAND, log, step

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "trace_fidelity.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, check=False
    )


def test_workloads_never_seen_are_judged_and_the_last_line_is_json(tmp_path):
    index = {}
    for name, factor in (("a_mystery-7b", 1.0), ("b_mystery-7b", 1.2), ("c_mystery-3b", 0.5)):
        rows = "".join(f"{step},{50 + 7 * i * step}\n" for step in range(1, 5) for i in range(16))
        with gzip.open(tmp_path / f"{name}.lengths.csv.gz", "wt") as file:
            file.write("step,response_tokens\n" + rows)
        steps = [{"step": number, **STEP, "timing_s/gen": 20.0 * factor} for number in range(1, 5)]
        for each in steps:
            del each["perf/total_num_tokens"], each["response_length/mean"]
        index[name] = {"steps": steps, "sequences_per_step": 16}
    (tmp_path / "workloads.json").write_text(json.dumps(index))
    done = run(str(tmp_path), "--quick", "--logs", *map(str, logs(tmp_path / "logs")))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    traced = {"step_error_same_workload", "step_error_other_workload"}
    logged = {"fit_then_simulate_error", "fit_then_simulate_error_worst"}
    assert document["claims"].keys() == traced | logged
    judged = {row["log"]: row for row in document["fit_then_simulate"]}
    assert {name: (row["fitted"], row["judged"]) for name, row in judged.items()} == {
        "even_qwen3-4b": (2, 2),
        "two_qwen3-4b-1": (2, 3),
        "two_qwen3-4b-2": (3, 3),
    }
    assert document["claims"]["fit_then_simulate_error_worst"]["value"] < 0.1
    assert all(row["constant_error"] == pytest.approx(0, abs=1e-4) for row in judged.values())
    assert document["logs_left_out"].keys() == {"async_qwen3-4b", "few_qwen3-4b"}
    assert [row["workload"] for row in document["other_model"]] == ["c_mystery-3b"]
    assert len(document["same_workload"]) == 3


def logs(folder: Path) -> list[Path]:
    """A folder of logs, and a log beside it."""
    folder.mkdir()
    for name, numbers in (("even", range(1, 5)), ("few", range(1, 4)), ("async", range(1, 9))):
        lines = [step(number) for number in numbers]
        log(folder, COMMAND, *(f"{line} - fully_async/x:1" if name == "async" else line for line in lines))
        (folder / "gsm8k_qwen3-4b.log").rename(folder / f"{name}_qwen3-4b.log")
    (folder / "README.md").write_text("no log")
    first, second = ([step(number) for number in range(1, count)] for count in (6, 7))
    two = log(folder.parent, COMMAND, *first, COMMAND, *second, name="two_qwen3-4b.log")
    return [folder, two]


def test_a_folder_that_is_not_there_ends_with_code_two(tmp_path):
    done = run(str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none" in done.stderr
