"""The benchmark judges any folder of traces, and says so where it cannot."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

from test_traces import STEP

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
        steps = [{"step": step, **STEP, "timing_s/gen": 20.0 * factor} for step in range(1, 5)]
        for step in steps:
            del step["perf/total_num_tokens"], step["response_length/mean"]
        index[name] = {"steps": steps, "sequences_per_step": 16}
    (tmp_path / "workloads.json").write_text(json.dumps(index))
    done = run(str(tmp_path), "--quick")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["claims"].keys() == {"step_error_same_workload", "step_error_other_workload"}
    assert [row["workload"] for row in document["other_model"]] == ["c_mystery-3b"]
    assert len(document["same_workload"]) == 3


def test_a_folder_that_is_not_there_ends_with_code_two(tmp_path):
    done = run(str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none" in done.stderr
