"""Profiles: fitted from runs, written, read, and built in."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_traces import STEP, write
from verl_logs import PLAIN, log, step

from jigsawrl.errors import JigsawError
from jigsawrl.graph.fit import fit_traces
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.interference import CORES, H200, Felt
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.predict import outlook_of, stage_seconds
from jigsawrl.graph.profile import Profile, builtin_profiles, load_profile, table_on, write_profile
from jigsawrl.graph.runs import read_runs
from jigsawrl.graph.traces import read_traces
from jigsawrl.policies.named import POLICIES
from jigsawrl.simulator.jobs import Job
from jigsawrl.simulator.simulation import Simulation


def fit_folder(folder: Path) -> Profile:
    """A profile of the runs in a folder or log."""
    traces, _ = read_runs(folder)
    return fit_traces(traces, folder.stem, "measured runs")


def test_a_fitted_profile_predicts_the_runs_it_was_fitted_on(tmp_path):
    profile = fit_folder(write(tmp_path))
    (trace,) = read_traces(tmp_path)
    seconds = stage_seconds(profile.workload("gsm8k_qwen3-4b").costs, trace, trace.steps[1])
    assert seconds["gen"] == pytest.approx(STEP["timing_s/gen"], rel=0.1)
    assert seconds["update_actor"] == pytest.approx(STEP["timing_s/update_actor"], rel=0.1)
    assert seconds["step"] == pytest.approx(STEP["timing_s/step"], rel=0.1)


def test_what_a_fit_is_judged_by_is_what_the_step_takes_when_it_is_planned_and_simulated(tmp_path):
    costs = fit_folder(write(tmp_path)).workload("gsm8k_qwen3-4b").costs
    (trace,) = read_traces(tmp_path)
    step = replace(
        trace.steps[1], total_tokens=float(trace.steps[1].lengths.sum()) + 8 * 80, turns=2, tool_wait=3
    )
    shape = outlook_of(trace, step, costs).shape
    believed = Forecast.from_prior(step.lengths, trace.max_tokens)
    job = Job(shape, costs, lambda number: step.lengths, believed)
    seconds = Simulation(POLICIES["serial"], [job], costs.hardware, costs.gpus, H200).run().seconds
    assert seconds == pytest.approx(stage_seconds(costs, trace, step)["step"])


def test_a_profile_is_the_same_after_writing_and_reading(tmp_path):
    profile = fit_folder(write(tmp_path))
    path = tmp_path / "out" / "mine.json"
    write_profile(profile, path)
    again = load_profile(path)
    assert again.name == profile.name
    assert again.workloads.keys() == profile.workloads.keys()
    workload = profile.workload("gsm8k_qwen3-4b")
    assert again.workload("gsm8k_qwen3-4b").quantiles == workload.quantiles
    assert again.workload("gsm8k_qwen3-4b").costs.decoding.a == pytest.approx(
        workload.costs.decoding.a, rel=1e-5
    )
    write_profile(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_profile_keeps_what_was_learned_of_sharing_its_hardware_and_only_of_that(tmp_path):
    fitted = fit_folder(write(tmp_path))
    learned = {("tail", ("bulk", "compute")): Felt(0.8, 3.5), ("compute", ("compute",)): Felt(1.25, 1.0)}
    table = replace(H200, learned=learned)
    write_profile(replace(fitted, interference=table), tmp_path / "mine.json")
    again = load_profile(tmp_path / "mine.json")
    assert again.interference == table
    assert table_on(again.hardware, again) == table
    assert table_on(replace(again.hardware, name="cpu"), again) is CORES
    assert table_on(again.hardware, None) is table_on(again.hardware, fitted) is H200


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("alone", {"tail": [[0.5, 0.5], [0.2, 1.0]]}, "from left to right"),
        ("alone", {"bulk": [[0.0, 1.5]]}, "nothing is faster"),
        ("beside", {"tail beside tail": [[0, -1]]}, "-1 is no speed"),
        ("beside", {"tail beside tail": [[0, 1], [1, 0]]}, "no speed is 0"),
        ("learned", {"tail beside magic": {"factor": 1.0, "times": 1.0}}, "'magic' binds no sub-stage"),
        ("learned", {"tail beside tail": {"factor": 0.0, "times": 1.0}}, "0.0 is no speed"),
        ("learned", {"tail beside tail": {"times": 1.0}}, "lacks the key 'factor'"),
        ("alone", None, "damaged"),
    ],
)
def test_a_table_that_gives_no_speeds_is_refused(tmp_path, part, change, said):
    path = tmp_path / "mine.json"
    write_profile(replace(fit_folder(write(tmp_path)), interference=H200), path)
    document = json.loads(path.read_text())
    document["interference"][part] = {**document["interference"][part], **change} if change else None
    path.write_text(json.dumps(document))
    with pytest.raises(JigsawError, match=said):
        load_profile(path)


def test_a_folder_of_logs_or_one_log_is_fitted_too(tmp_path):
    path = log(tmp_path, *(f"step:{step} - {PLAIN}" for step in (1, 2, 3)))
    for source in (tmp_path, path):
        workload = fit_folder(source).workload("gsm8k_qwen3-4b")
        assert workload.reconstructed
        assert workload.gpus == 8


def test_a_run_is_expected_to_go_on_as_after_its_first_step(tmp_path):
    first = step(1, total_num_tokens=2001101).replace(
        "response_length/mean:290.1", "response_length/mean:1850.0"
    )
    lines = [first, *(step(number) for number in (2, 3))]
    workload = fit_folder(log(tmp_path, *lines)).workload("gsm8k_qwen3-4b")
    assert len(workload.quantiles) == 2
    for number in range(4):
        assert float(np.mean(workload.lengths(number))) == pytest.approx(290, rel=0.05)
    (tmp_path / "gsm8k_qwen3-4b.log").unlink()
    assert len(fit_folder(log(tmp_path, step(1))).workload("gsm8k_qwen3-4b").quantiles) == 1


def test_an_empty_folder_says_what_it_should_hold(tmp_path):
    with pytest.raises(JigsawError, match=r"workloads\.json"):
        fit_folder(tmp_path)
    with pytest.raises(JigsawError, match="no such folder"):
        fit_folder(tmp_path / "none")


@pytest.mark.parametrize("name", ["h100-traces", "h200", "h20", "h800"])
def test_every_built_in_profile_knows_all_traced_workloads(name):
    profile = load_profile(name)
    assert len(profile.workloads) == 17
    assert profile.source
    assert profile.derived == (name != "h100-traces")
    for workload in profile.workloads.values():
        costs = workload.costs
        outlook = Outlook(workload.shape(), costs, costs.hardware, workload.forecast(workload.max_tokens))
        assert 1 < outlook.rollout_seconds(1, costs.tp) < 10_000
        assert costs.hardware == profile.hardware
        assert costs.derived == profile.derived
        assert workload.shape().sequences == 1024


def test_built_in_profiles_are_small_and_name_their_source():
    from importlib import resources

    folder = resources.files("jigsawrl.graph") / "profiles"
    sizes = [len((folder / f"{name}.json").read_bytes()) for name in builtin_profiles()]
    assert sum(sizes) < 400_000
    assert "Rabenda/verl_customize, Apache-2.0" in load_profile("h100-traces").source


def test_quantiles_keep_the_longest_and_about_the_sum():
    workload = load_profile("h100-traces").workload("gsm8k_qwen3-4b-instruct")
    lengths = workload.lengths(0)
    assert lengths.max() == workload.quantiles[0][-1]
    assert float(np.mean(lengths)) == pytest.approx(257, rel=0.03)


def test_other_hardware_is_marked_as_derived():
    profile = load_profile("h100-traces")
    costs = profile.workload("gsm8k_qwen3-4b").costs
    assert not costs.derived
    assert costs.on(hardware_named("a100")).derived
    with pytest.raises(JigsawError, match="h100"):
        hardware_named("abacus")
    with pytest.raises(JigsawError, match="gsm8k_qwen3-4b"):
        profile.workload("nothing")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "hardware": "h100"}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(JigsawError, match=r"p\.json"):
        load_profile(path)


def test_a_profile_with_a_negative_coefficient_is_refused(tmp_path):
    path = tmp_path / "p.json"
    write_profile(fit_folder(write(tmp_path)), path)
    document = json.loads(path.read_text())
    document["workloads"]["gsm8k_qwen3-4b"]["costs"]["decode"]["a"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(JigsawError, match=r"decode\.a"):
        load_profile(path)


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(JigsawError, match="h100-traces"):
        load_profile("h101")


def test_profiles_do_not_import_torch():
    code = "import sys, jigsawrl.graph.fit, jigsawrl.graph.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
