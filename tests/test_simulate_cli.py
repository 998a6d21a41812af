"""The commands that plan: simulate, compare and fit. All of them without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from cli_helpers import Case, Outcome, outcomes_of, without_torch

from jigsawrl.config.pipelines import PipelineConfig, PipelinesConfig, PolicyName, load_mix
from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import HARDWARE
from jigsawrl.graph.profile import load_profile
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime.first_outlook import first_outlook
from jigsawrl.simulator.compare import alone_seconds, simulate
from jigsawrl.simulator.from_config import Scene, scene_of
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.runreport import run_report

PAIR = """
workers: 8
pipelines:
  gsm8k: {workload: gsm8k_qwen3-4b, steps: 2}
  search: {workload: search_r1_qwen3-4b-instruct_nprobe32, steps: 1, arrival: 60, max_slowdown: 1.0}
"""
SUMS = "task: {kind: arithmetic}\nsteps: 3\n"
BOTH = """
pipelines:
  sums: {run: sums.yaml, priority: 1}
  search: {workload: search_r1_qwen3-4b-instruct_nprobe32, steps: 1}
"""
STEP = (
    "step:{step} - response_length/mean:290.1 - response_length/max:4096.0 - response_length/min:12.0 - "
    "response_length/clip_ratio:0.01 - prompt_length/mean:104.2 - timing_s/gen:{gen} - timing_s/old_log_prob:12.2 - "
    "timing_s/ref:18.2 - timing_s/update_actor:35.6 - timing_s/step:129.0 - perf/total_num_tokens:403763 - "
    "perf/throughput:391.244\n"
)
LOG = "".join(STEP.format(step=step, gen=59 + step) for step in (1, 2, 3))
FILES = (
    ("pair.yaml", PAIR),
    ("sums.yaml", SUMS),
    ("both.yaml", BOTH),
    ("mine_qwen3-4b.log", LOG),
    ("torn/qwen3-4b.log", STEP.format(step=1, gen=59)[:60]),
    ("empty/qwen3-4b.log", ""),
    ("logs/async_qwen3-4b.log", LOG.replace("gen:", "wait_prev_gen:1.0 - timing_s/gen:")),
    ("logs/notes.txt", "no log\n"),
    ("logs/odd_qwen3-4b.log", LOG.replace("gen:61", "gen:nan").replace("gen:62", "gen:0.5")),
    ("logs/two_qwen3-4b.log", LOG + LOG),
    ("notes.json", "{}\n"),
    ("kept/notes.txt", "mine\n"),
    ("nested.yaml", "pipelines: {a: {run: pair.yaml}}\n"),
    ("model/config.json", "{}\n"),
)
POLICY_CHOICES = "jigsaw, serial, concurrent, rollout-mux, rollmux, rlix, greedy"
WORKLOADS = ", ".join(load_profile("h100-traces").workloads)
KINDS = ", ".join(HARDWARE)

REFUSED = {
    "policy": Case(
        "simulate pair.yaml --policy jigsw",
        2,
        f"jigsaw: policy: 'jigsw' is not allowed; it must be one of {POLICY_CHOICES}; did you mean 'jigsaw'?\n",
    ),
    "policies": Case(
        "compare pair.yaml --simulate --policies serial,rolmux",
        2,
        f"jigsaw: --policies: 'rolmux' is not allowed; it must be one of {', '.join(POLICIES)}; "
        "did you mean 'rollmux'?\n",
    ),
    "hardware": Case(
        "simulate pair.yaml --hardware h10",
        2,
        f"jigsaw: hardware: 'h10' is not allowed; it must be one of {KINDS}; did you mean 'h100'?\n",
    ),
    "workload": Case(
        "simulate pair.yaml pipelines.gsm8k.workload=gsm8k_qwen4b",
        2,
        "jigsaw: pipelines.gsm8k.workload: 'gsm8k_qwen4b' is not allowed; it must be one of "
        f"{WORKLOADS}; did you mean 'gsm8k_qwen3-4b'?\n",
    ),
    "profile": Case(
        "compare pair.yaml --simulate --profile h100-trace --out there",
        2,
        "jigsaw: profile: 'h100-trace' is not allowed; it must be one of h100-traces, h20, h200, h800; "
        "did you mean 'h100-traces'?\n",
    ),
    "profile file": Case(
        "simulate pair.yaml --profile no.json",
        2,
        "jigsaw: no.json: there is no such profile; built in are h100-traces, h20, h200, h800. "
        "'jigsaw fit FOLDER' makes one\n",
    ),
    "no profile": Case(
        "simulate pair.yaml --profile notes.json",
        2,
        "jigsaw: notes.json: is no profile of format 1; make it anew with 'jigsaw fit'\n",
    ),
    "key": Case(
        "simulate pair.yaml pipelines.gsm8k.stpes=3",
        2,
        "jigsaw: pipelines.gsm8k.stpes: no such setting; did you mean 'steps'?\n",
    ),
    "value": Case(
        "simulate pair.yaml pipelines.gsm8k.max_slowdown=0.5 pipelines.search=fast --workers 0",
        2,
        "jigsaw: workers: 0 is not allowed; it must be a whole number, at least 1 and at most 4096 (default 4)\n"
        "pipelines.gsm8k.max_slowdown: 0.5 is not allowed; it must be a number, at least 1, or null\n"
        "pipelines.search: 'fast' is not allowed; it must be a section (keys beneath it)\n",
    ),
    "neither workload nor run": Case(
        "simulate bare.yaml",
        2,
        "jigsaw: pipelines.a: needs one of workload (of a profile) and run (a run file)\n",
        files=(("bare.yaml", "pipelines: {a: {steps: 3}}\n"),),
    ),
    "no pipeline": Case(
        "simulate pair.yaml pipelines={}",
        2,
        "jigsaw: pipelines: {} is not allowed; it must be a mapping (keys and values), not empty and "
        "at most 256 of them\n",
    ),
    "both": Case(
        "simulate pair.yaml pipelines.gsm8k.run=sums.yaml",
        2,
        "jigsaw: pipelines.gsm8k: needs one of workload (of a profile) and run (a run file)\n",
    ),
    "memory": Case(
        "simulate pair.yaml --workers 4 pipelines.gsm8k.tp=8",
        2,
        "jigsaw: gsm8k: an engine spans 8 workers and there are 4\n",
    ),
    "unknown key of one run": Case(
        "simulate sums.yaml rollout.sampels=3",
        2,
        "jigsaw: rollout.sampels: no such setting; did you mean 'samples'?\n",
    ),
    "no model": Case(
        "simulate sums.yaml model.path=model",
        2,
        "jigsaw: model.path: {folder}/model/config.json says model_type None; supported are llama, mistral, "
        "qwen2, qwen3\n",
    ),
    "no file": Case("simulate no.yaml", 2, "jigsaw: no.yaml: there is no such run file\n"),
    "nested": Case(
        "simulate nested.yaml",
        2,
        "jigsaw: {folder}/pair.yaml: holds several pipelines itself; a pipeline's run file holds one\n",
    ),
    "folder in use": Case(
        "simulate pair.yaml --out kept",
        2,
        "jigsaw: kept: holds notes.txt, which is not of a simulation; choose another folder with --out\n",
    ),
    "real runs": Case(
        "compare pair.yaml",
        2,
        "jigsaw: pipelines.gsm8k: a workload of a profile can only be simulated; add --simulate,\n"
        "or give it a run file (run: FILE)\n",
    ),
    "policies of real runs": Case(
        "compare sums.yaml --policies serial,rolmux",
        2,
        f"jigsaw: --policies: 'rolmux' is not allowed; it must be one of {', '.join(POLICIES)}; "
        "did you mean 'rollmux'?\n",
    ),
    "folder of real runs in use": Case(
        "compare sums.yaml --out kept",
        2,
        "jigsaw: kept: is not empty; choose another folder with --out\n",
    ),
    "folder of an earlier comparison": Case(
        "compare sums.yaml --out c",
        2,
        "jigsaw: c: holds a comparison already; choose another folder with --out\n",
        files=(("c/compare.json", "{}"), ("c/serial/config.yaml", "")),
    ),
    "hardware of real runs": Case(
        "compare sums.yaml --hardware h200",
        2,
        "jigsaw: --hardware: is for simulated runs; add --simulate, or leave it out\n",
    ),
    "run": Case(
        "run pair.yaml",
        2,
        "jigsaw: pipelines.gsm8k: a workload of a profile can only be simulated; give it a run file (run: FILE),\n"
        "or try 'jigsaw simulate'\n",
    ),
    "nothing to fit": Case("fit nowhere", 2, "jigsaw: nowhere: there is no such folder or log\n"),
    "hardware of a fit": Case(
        "fit mine_qwen3-4b.log --hardware h30",
        2,
        f"jigsaw: --hardware: 'h30' is not allowed; it must be one of {KINDS}; did you mean 'h20'?\n",
    ),
    "no profile to overwrite": Case(
        "fit mine_qwen3-4b.log --out notes.json",
        2,
        "jigsaw: notes.json: exists and is no profile; choose another file with --out\n",
    ),
    "folder to overwrite": Case(
        "fit mine_qwen3-4b.log --out kept", 2, "jigsaw: kept: is a folder; name a file with --out\n"
    ),
}
DONE = {
    "simulate": Case("simulate pair.yaml --out sim", 0, "", None),
    "simulate again": Case(
        "simulate pair.yaml --out sim --seed 1",
        0,
        "",
        None,
        (("sim/report.json", ""), ("sim/report.html", "of another simulation")),
    ),
    "simulate as json": Case("simulate pair.yaml --policy serial --hardware h200 --json", 0, "", None),
    "one run": Case("simulate sums.yaml rollout.samples=4 --workers 2 --json", 0, "", None),
    "a run among others": Case("simulate both.yaml --json", 0, "", None),
    "compare": Case("compare pair.yaml --simulate", 0, "", None),
    "compare some": Case(
        "compare pair.yaml --simulate --policies rollmux,jigsaw --out c --json", 0, "", None
    ),
    "fit": Case("fit mine_qwen3-4b.log", 0, "", None),
    "fit as json": Case("fit . --name mine --hardware H200 --out there/p.json --json", 0, "", None),
}
HELP = {name: Case(f"{name} --help", 0, "", None) for name in ("simulate", "compare", "fit")}
TORN = {
    "torn": Case("fit torn", 2, "", None),
    "empty": Case("fit empty --json", 2, "", None),
}
DOUBTED = {
    "doubted": Case("fit logs --out doubted.json", 0, "", None),
    "several": Case(
        "fit mine_qwen3-4b.log logs/two_qwen3-4b.log logs/notes.txt nowhere --name several", 0, "", None
    ),
    "doubted as json": Case("fit logs --out doubted.json --json", 0, "", None),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = {
        f"{kind}: {name}": case
        for kind, group in (
            ("refused", REFUSED),
            ("done", DONE),
            ("help", HELP),
            ("torn", TORN),
            ("doubted", DOUBTED),
        )
        for name, case in group.items()
    }
    return outcomes_of(cases, FILES, tmp_path_factory, without_torch(tmp_path_factory))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_said_and_nothing_is_written(name: str, outcomes: dict[str, Outcome]) -> None:
    case, outcome = REFUSED[name], outcomes[f"refused: {name}"]
    assert outcome.stderr == case.stderr.replace("{folder}", str(outcome.folder))
    assert (outcome.code, outcome.stdout, outcome.written) == (2, "", set())


@pytest.mark.parametrize("name", DONE)
def test_what_is_right_is_done(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[f"done: {name}"]
    assert (outcome.code, outcome.stderr) == (0, "")
    assert max(map(len, outcome.stdout.splitlines())) <= 80 or "--json" in DONE[name].arguments


def result(name: str, outcomes: dict[str, Outcome]) -> dict:
    (line,) = outcomes[f"done: {name}"].stdout.splitlines()
    return json.loads(line)


def test_a_simulation_says_what_it_rests_on_and_what_came_out(outcomes: dict[str, Outcome]) -> None:
    page = " ".join(outcomes["done: simulate"].stdout.split())
    for words in (
        "2 pipelines on 8 workers (h100), simulated with profile h100-traces",
        "measured: gsm8k_qwen3-4b in profile h100-traces, 5 logged steps",
        "carried over: gsm8k_qwen3-4b on 4 h100 (tp 4) to 8 h100 (tp 4)",
        "against alone on all workers",
        "at most 1x:",
        "% busy",
        "A gsm8k B search",
    ):
        assert words in page


def test_a_simulation_leaves_the_files_of_a_real_run(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["done: simulate"]
    folder = outcome.folder / "sim"
    names = {"events.jsonl", "timeline.json", "picture.svg", "report.json", "report.html"}
    assert outcome.written == {"sim", *(f"sim/{name}" for name in names)}
    events = [event for _, event in jsonl.read(folder / "events.jsonl")]
    saved = json.loads((folder / "report.json").read_text())
    assert json.loads(json.dumps(run_report(folder).report.as_dict())) == saved["report"]
    assert saved["report"]["tokens_per_second"] == saved["tokens_per_second"]
    for pipeline in saved["report"]["pipelines"]:
        assert pipeline["seconds"] == saved["pipelines"][pipeline["name"]]["seconds"]
        assert pipeline["tokens"] == round(saved["pipelines"][pipeline["name"]]["tokens"])
    assert {e["event"] for e in events} == {"start", "action", "substage", "step", "finished"}
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert ElementTree.fromstring((folder / "picture.svg").read_text()).tag.endswith("svg")


def test_another_seed_is_another_simulation(outcomes: dict[str, Outcome]) -> None:
    first, again = (
        json.loads((outcomes[f"done: {name}"].folder / "sim" / "report.json").read_text())
        for name in ("simulate", "simulate again")
    )
    assert (first["seed"], again["seed"]) == (0, 1)
    assert first["seconds"] != again["seconds"]
    renewed = (outcomes["done: simulate again"].folder / "sim" / "report.html").read_text()
    assert "of another simulation" not in renewed


def test_other_hardware_is_said_to_be_carried_over(outcomes: dict[str, Outcome]) -> None:
    found = result("simulate as json", outcomes)
    costs = found["scene"]["gsm8k"]["figures"]["costs"]
    assert costs == {
        "kind": "carried over",
        "source": "gsm8k_qwen3-4b on 4 h100 (tp 4) to 8 h200 (tp 4)",
    }
    assert (found["policy"], found["hardware"], found["workers"]) == ("serial", "h200", 8)
    pipelines = found["pipelines"]
    assert pipelines["gsm8k"]["slowdown"] == pytest.approx(1.0)
    assert pipelines["search"]["slowdown"] > 1.0
    assert pipelines["search"]["kept"] is False


def test_an_ordinary_run_file_is_simulated_from_priors(outcomes: dict[str, Outcome]) -> None:
    found = result("one run", outcomes)
    sums = found["scene"]["sums"]
    assert (found["workers"], sums["steps"], sums["sequences"], sums["model"]) == (2, 3, 64, "tiny")
    assert {each["kind"] for each in (sums["figures"]["lengths"], sums["figures"]["costs"])} == {"prior"}
    assert "median 16 (a quarter of max_tokens)" in sums["figures"]["lengths"]["source"]
    assert found["pipelines"]["sums"]["slowdown"] == pytest.approx(1.0, abs=0.02)


def test_run_files_and_workloads_go_together(outcomes: dict[str, Outcome]) -> None:
    found = result("a run among others", outcomes)
    assert set(found["pipelines"]) == {"sums", "search"}
    assert found["scene"]["sums"]["priority"] == 1


def test_every_policy_is_compared_and_one_is_best(outcomes: dict[str, Outcome]) -> None:
    page = outcomes["done: compare"].stdout
    assert all(f" {policy} " in page for policy in POLICIES)
    assert page.count("★") == 1
    assert "serial" in page
    assert "1.00x" in page


def test_a_comparison_is_against_serial_even_if_that_is_not_asked_for(outcomes: dict[str, Outcome]) -> None:
    found = result("compare some", outcomes)
    assert [each["policy"] for each in found["policies"]] == ["rollmux", "jigsaw"]
    best = max(found["policies"], key=lambda each: each["throughput_vs_serial"])
    assert found["best"] == best["policy"]
    outcome = outcomes["done: compare some"]
    assert outcome.written == {"c", "c/comparison.svg", "c/comparison.json"}
    picture = ElementTree.fromstring((outcome.folder / "c" / "comparison.svg").read_text())
    charts = [each for each in picture if each.tag.endswith("}svg")]
    titles = ["".join(chart[0].itertext()).split(":")[0] for chart in charts]
    assert titles == ["rollmux", "jigsaw"]
    assert [int(chart.get("y", "")) for chart in charts] == [0, int(charts[0].get("height", ""))]


def test_a_log_becomes_a_profile_that_simulations_take(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    outcome = outcomes["done: fit"]
    assert outcome.written == {"mine_qwen3-4b.json"}
    assert "jigsaw simulate FILE --profile mine_qwen3-4b.json" in " ".join(outcome.stdout.split())
    mix = tmp_path / "mix.yaml"
    mix.write_text("pipelines: {a: {workload: mine_qwen3-4b, steps: 1}}\nworkers: 8\n")
    profile = str(outcome.folder / "mine_qwen3-4b.json")
    scene = scene_of(load_mix(mix, options={"profile": profile}))
    assert simulate(scene, "serial", alone_seconds(scene)).seconds > 0


def test_a_fit_says_how_far_it_is_off(outcomes: dict[str, Outcome]) -> None:
    found = result("fit as json", outcomes)
    assert found["hardware"] == "h200"
    assert load_profile(found["profile"]).name == "mine"
    stages = found["workloads"]["mine_qwen3-4b"]["stages"]
    assert set(stages) == {"rollout", "log-probs", "update"}
    assert stages["log-probs"]["logged"] == pytest.approx(30.4)
    assert all(stage["error"] < 0.2 for stage in stages.values())


def test_a_fit_says_what_it_believed_of_every_log(outcomes: dict[str, Outcome]) -> None:
    believed = "read 3 of 3 steps, 1,024 sequences, tp 2 assumed, 8 GPUs, "
    assert f"mine_qwen3-4b:\n  {believed}h100 assumed\n" in outcomes["done: fit"].stdout
    found = result("fit as json", outcomes)
    workload = found["workloads"]["mine_qwen3-4b"]
    assert (workload["read"], workload["warnings"], found["left_out"]) == (f"{believed}h200", [], [])


def test_a_fit_warns_of_what_is_hard_to_believe_and_leaves_out_what_cannot_be_used(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["doubted: doubted"]
    assert (outcome.code, outcome.written) == (0, {"doubted.json"})
    said = outcome.stderr.splitlines()
    for start, reason in (
        ("left out: logs/async_qwen3-4b.log", "asynchronous trainer (its steps log timing_s/wait_prev_gen)"),
        ("left out: logs/notes.txt", "is a step"),
        (
            "warning: odd_qwen3-4b",
            "left out 1 of 3 steps: logs/odd_qwen3-4b.log, line 2: timing_s/gen is nan",
        ),
        ("warning: odd_qwen3-4b", "only 2 usable steps"),
        ("warning: two_qwen3-4b-2", "holds 2 runs"),
    ):
        assert any(line.startswith(start) and reason in line for line in said), (start, reason)
    assert "read 2 of 3 steps" in outcome.stdout
    document = json.loads(outcomes["doubted: doubted as json"].stdout)
    assert set(document["workloads"]) == {"odd_qwen3-4b", "two_qwen3-4b-1", "two_qwen3-4b-2"}
    assert len(document["left_out"]) == 2
    assert len(document["workloads"]["odd_qwen3-4b"]["warnings"]) >= 2


def test_several_logs_become_one_profile(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["doubted: several"]
    assert (outcome.code, outcome.written) == (0, {"several.json"})
    workloads = load_profile(outcome.folder / "several.json").workloads
    assert set(workloads) == {"mine_qwen3-4b", "two_qwen3-4b-1", "two_qwen3-4b-2"}
    assert "left out: logs/notes.txt" in outcome.stderr
    assert "left out: nowhere: there is no such folder or log" in outcome.stderr


@pytest.mark.parametrize(("name", "start"), [("torn", "torn/qwen3-4b.log"), ("empty", "empty/qwen3-4b.log")])
def test_a_log_that_cannot_be_used_is_named(name: str, start: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[f"torn: {name}"]
    assert (outcome.code, outcome.stdout, outcome.written) == (2, "", set())
    assert outcome.stderr.startswith(f"jigsaw: {start}")
    assert outcome.stderr.count("\n") <= 3


@pytest.mark.parametrize("name", HELP)
def test_help_fits_a_small_terminal(name: str, outcomes: dict[str, Outcome]) -> None:
    page = outcomes[f"help: {name}"].stdout
    assert max(map(len, page.splitlines())) <= 80
    assert "\nExamples\n" in page


def test_a_run_file_may_name_every_policy() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


def scene(tmp_path: Path, content: str, *overrides: str, **options: object) -> Scene:
    path = tmp_path / "mix.yaml"
    path.write_text(content)
    return scene_of(load_mix(path, overrides, options))


def test_a_run_with_a_workload_of_its_name_is_measured(tmp_path: Path) -> None:
    mine = scene(tmp_path, "name: math_qwen3-0.6b\ntask: {kind: arithmetic}\nrollout: {max_tokens: 500}\n")
    (job,), (origin,) = mine.jobs, mine.origins
    assert origin.lengths.kind == "measured"
    assert job.lengths(1).max() == 500
    assert (job.lengths(2) == job.lengths(2)).all()


def test_a_measured_run_is_foreseen_as_the_run_itself_would_be(tmp_path: Path) -> None:
    """By all of its steps, in the simulator and for real."""
    profile = load_profile("h100-traces")
    (job,) = scene(
        tmp_path, "name: gsm8k_qwen3-0.6b\ntask: {kind: arithmetic}\nrollout: {max_tokens: 500}\n"
    ).jobs
    run = load_mix(tmp_path / "mix.yaml").runs["gsm8k_qwen3-0.6b"]
    known, entry = profile.workload("gsm8k_qwen3-0.6b"), PipelineConfig(run="mix.yaml")
    real = first_outlook("a", run, entry, profile.hardware, 1, known)
    assert (job.forecast.quantiles() == real.forecast.quantiles()).all()
    assert len(job.forecast.history) == min(8, len(known.quantiles)) > 1


def test_the_shape_of_a_run_follows_from_its_file(tmp_path: Path) -> None:
    (job,) = scene(
        tmp_path,
        "task: {kind: calculator, max_turns: 3, latency: 0.5, latency_jitter: 0.25, max_number: 99}\n"
        "algorithm: {kl_coef: 0.1, advantage: gae, epochs: 2}\n"
        "rollout: {prompts_per_step: 4, samples: 2, max_tokens: 30}\n",
        "algorithm.old_logprobs=engine",
    ).jobs
    shape = job.shape
    assert (shape.prompts, shape.samples, shape.max_tokens, shape.prompt_tokens) == (4, 2, 30, 6.0)
    assert (shape.turns, shape.tool_seconds) == (3, 0.75)
    assert (shape.reference, shape.critic, shape.epochs, shape.old_logprobs) == (True, True, 2, False)
    lengths = job.lengths(1)
    assert len(lengths) == 8
    assert 1 <= lengths.min() <= lengths.max() <= 30


@pytest.mark.parametrize(
    ("algorithm", "asked"),
    [
        ("{}", False),
        ("{kl_coef: 0.1}", False),
        ("{epochs: 2}", True),
        ("{minibatches: 2}", True),
        ("{kl_coef: 0.1, kl_in: reward}", True),
        ("{minibatches: 2, old_logprobs: engine}", False),
    ],
)
def test_the_old_policy_is_planned_to_be_asked_where_it_will_be(
    tmp_path: Path, algorithm: str, asked: bool
) -> None:
    """With one update a step the log-probs of its own pass are the old ones."""
    (job,) = scene(tmp_path, f"task: {{kind: arithmetic}}\nalgorithm: {algorithm}\n").jobs
    assert job.shape.old_logprobs is asked


def test_a_model_folder_needs_only_its_config(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    config = {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    }
    (tmp_path / "big" / "config.json").write_text(json.dumps(config))
    text = "task: {kind: arithmetic}\nmodel: {path: big}\nrollout: {max_tokens: 8192}\n"
    found = scene(tmp_path, text, workers=8)
    model = found.jobs[0].shape.model
    assert (model.name, model.parameters, model.kv_heads) == ("big", 7615616512, 4)
    assert found.origins[0].costs.kind == "carried over"
    with pytest.raises(JigsawError, match=r"mix: training needs 1\d\d GB on each of 1 workers"):
        scene(tmp_path, text, workers=1)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    path = tmp_path / "mix.yaml"
    path.write_text("profile: mine.json\npipelines: {a: {run: sums.yaml}}\n")
    mix = load_mix(path)
    assert mix.config.profile == str(tmp_path / "mine.json")
    assert mix.runs["a"].steps == 3


def test_names_of_pipelines_must_be_names(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text("pipelines: {a/b: {workload: x}}\n")
    with pytest.raises(JigsawError, match=r"^pipelines.a/b: 'a/b' cannot name a folder"):
        load_mix(path)


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in PipelinesConfig.model_fields.values())


def test_the_example_is_simulated(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "simulate" / "run.yaml"
    found = scene_of(load_mix(example))
    alone = alone_seconds(found)
    assert simulate(found, "jigsaw", alone).seconds < 0.65 * sum(alone.values())
