"""One pipeline from end to end: what it leaves behind, and what must not change its result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import COLD, SMALL, learned, metrics, train

from jigsawrl.errors import JigsawError
from jigsawrl.telemetry.runreport import run_report

AGENTIC = {
    "task": {"kind": "calculator", "max_number": 9, "size": 32, "latency": 0.0, "max_turns": 3},
    "rollout": {"stop": ["]"], "max_tokens": 16},
    "model": {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 60, "warmup_noise": 0.2}},
}


def test_a_run_leaves_a_folder_that_others_can_read(tmp_path):
    import transformers
    import yaml

    out = tmp_path / "run"
    result = train(out, steps=4, checkpoint={"every": 2, "keep": 1}, telemetry={"tensorboard": True})
    assert result.steps == 4
    assert yaml.safe_load((out / "config.yaml").read_text())["steps"] == 4
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert metrics(out)[0]["reward/mean"] > 0
    assert list((out / "tensorboard").glob("events.*"))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000004"]
    model = transformers.AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    prompt = tokenizer("2+3=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[0] == 1
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    stages = {event["substage"] for event in events if event["event"] == "substage"}
    assert {"prefill", "decode", "grad", "optim", "sync"} <= stages
    assert (events[0]["event"], events[-1]["event"]) == ("start", "finished")
    base = load_file(out / "base" / "model.safetensors")
    final = load_file(out / "model" / "model.safetensors")
    assert any(not torch.equal(base[name], final[name]) for name in base)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_of_a_run_have_the_mode_that_the_umask_gives(umask, mode, tmp_path):
    out = tmp_path / "out"
    before = os.umask(umask)
    try:
        lora = {**COLD, "lora": {"rank": 2}}
        train(out, steps=1, model=lora, checkpoint={"every": 1}, telemetry={"tensorboard": True})
    finally:
        os.umask(before)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {path.relative_to(out).parts[0] for path in files} >= {"adapter", "base", "checkpoints", "model"}
    assert {str(path) for path in files if path.stat().st_mode & 0o777 != mode} == set()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    train(tmp_path / "a", deterministic=True)
    train(tmp_path / "b", deterministic=True)
    train(tmp_path / "c", deterministic=True, seed=1)
    assert learned(tmp_path / "a") == learned(tmp_path / "b")
    assert learned(tmp_path / "a") != learned(tmp_path / "c")


def test_how_the_rollout_is_batched_does_not_change_what_is_learned(tmp_path):
    train(tmp_path / "a", deterministic=True)
    small = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "kv_cache_tokens": 128, "block_size": 4}
    train(tmp_path / "b", deterministic=True, rollout=small)
    assert learned(tmp_path / "a") == learned(tmp_path / "b")


def test_samples_end_by_themselves_unless_all_are_to_be_of_one_length(tmp_path):
    train(tmp_path / "ends", steps=1)
    train(tmp_path / "goes-on", steps=1, rollout={"ignore_eos": True})
    assert metrics(tmp_path / "ends")[0]["response_length/mean"] < 6
    assert metrics(tmp_path / "goes-on")[0]["response_length/mean"] == 6


def test_an_agentic_task_takes_turns_and_tool_latency_does_not_change_what_is_learned(tmp_path):
    train(tmp_path / "a", deterministic=True, **AGENTIC)
    slow = {**AGENTIC["task"], "latency": 0.01, "latency_jitter": 0.05}
    train(tmp_path / "b", deterministic=True, **{**AGENTIC, "task": slow})
    assert learned(tmp_path / "a") == learned(tmp_path / "b")
    assert metrics(tmp_path / "a")[0]["turns/mean"] > 1
    assert metrics(tmp_path / "a")[0]["reward/mean"] > 0
    events = [json.loads(line) for line in (tmp_path / "b" / "events.jsonl").read_text().splitlines()]
    assert any(event.get("substage") == "tool" for event in events)


def test_a_tiny_model_is_trained_without_what_takes_seconds_to_import(tmp_path):
    train = "from small_runs import train; train(Path('run'), steps=1, deterministic=True)"
    heavy = "{'transformers', 'sympy', 'torch._dynamo', 'torch.distributed.tensor'}"
    code = f"import sys; from pathlib import Path; {train}; print({heavy} & sys.modules.keys())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr


@pytest.mark.slow
def test_two_workers_learn_what_one_learns(tmp_path):
    both = {"steps": 4, "deterministic": True, "algorithm": {"kl_coef": 0.05, "minibatches": 2}}
    train(tmp_path / "one", **both)
    train(tmp_path / "two", workers=2, **both)
    for one, two in zip(learned(tmp_path / "one"), learned(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)


def test_adapters_are_exported_beside_the_merged_model_and_resume(tmp_path):
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 80, "warmup_noise": 0.3}, "lora": {"rank": 4}}
    train(tmp_path / "run", steps=2, model=model)
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["r"] == 4
    state = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "policy.safetensors")
    assert all(".lora." in name for name in state if name.startswith("weight."))
    result = train(tmp_path / "run", resume=True, steps=4, model=model)
    assert result.steps == 4


def test_prompts_that_are_too_long_are_left_out_and_too_few_are_an_error(tmp_path):
    lines = [{"prompt": "7" * n + "=", "answer": "1"} for n in range(1, 21)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    task = {"kind": "data", "path": str(data), "reward": {"path": f"{reward}:score"}}
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}
    train(tmp_path / "run", steps=1, task=task, model=model, rollout={"max_prompt_tokens": 12})
    assert metrics(tmp_path / "run")[0]["reward/mean"] == 1.0
    with pytest.raises(JigsawError, match="only 3 prompts of at most 4 tokens"):
        train(tmp_path / "other", steps=1, task=task, model=model, rollout={"max_prompt_tokens": 4})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no such key')", "no such key"),
        ("while True: pass", "0.5 s"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_reward_that_raises_hangs_or_dies_counts_as_zero_or_stops_the_run(body, says, tmp_path):
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    if ground_truth == '3':\n        {body}\n    return 1.0\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(8)))
    target = {"path": f"{reward}:score", "timeout": 0.5}
    task = {"kind": "data", "path": str(data), "reward": target}
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}
    train(tmp_path / "zero", steps=1, task=task, model=model, rollout={"samples": 2})
    (row,) = metrics(tmp_path / "zero")
    assert (row["reward/mean"], row["reward/errors"]) == (7 / 8, 2)
    target["on_error"] = "stop"
    with pytest.raises(JigsawError, match=says):
        train(tmp_path / "stop", steps=1, task=task, model=model, rollout={"samples": 2})


def test_a_run_that_was_killed_and_resumed_has_the_same_figures_everywhere(tmp_path):
    out = tmp_path / "run"
    train(out, steps=2)
    log = out / "events.jsonl"
    *lines, finished = log.read_text().splitlines(keepends=True)
    assert json.loads(finished)["event"] == "finished"
    log.write_text("".join(lines))  # as a kill leaves it
    summary = train(out, steps=4, resume=True).summary
    found = run_report(out).as_dict()
    (pipeline,) = found["report"]["pipelines"]
    for figure in ("seconds", "tokens", "tokens_per_second"):
        assert summary.as_dict()[figure] == pipeline[figure] == found["report"][figure]
    assert (summary.reward_first, summary.reward_last) == (pipeline["reward_first"], pipeline["reward_last"])
    times = {event["event"]: event["t"] for event in map(json.loads, log.read_text().splitlines())}
    before = json.loads(lines[-1])["t"] - json.loads(lines[0])["t"]
    assert summary.seconds == pytest.approx(before + times["finished"] - times["resume"], abs=0.02)
    assert summary.tokens == sum(row["perf/tokens"] for row in metrics(out))
    assert [one["event"] for one in found["incidents"]] == ["killed"]


def test_a_run_that_finds_nothing_to_resume_from_says_that_it_begins_again(tmp_path, capsys):
    train(tmp_path / "run", steps=1)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(tmp_path / "run", steps=2, resume=True)
    assert "nothing is left of what it had learned: it begins again" in capsys.readouterr().err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


def test_a_run_ends_when_no_sample_of_a_step_could_be_rewarded(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def score(data_source, solution_str, ground_truth):\n    return float(ground_truth)\n"
    )
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}=", "solution": "1"}) for n in range(8))
    )
    reward = {"path": f"{tmp_path / 'rewards.py'}:score"}
    task = {"kind": "data", "path": str(tmp_path / "data.jsonl"), "reward": reward}
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}
    with pytest.raises(JigsawError, match=r"every one of its \d+ samples failed to be rewarded: .*NoneType"):
        train(tmp_path / "none", steps=1, task=task, model=model)
    task["ground_truth"] = "solution"
    train(tmp_path / "named", steps=1, task=task, model=model)
    assert metrics(tmp_path / "named")[0]["reward/mean"] == 1.0


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "a folder without a run"])
def test_a_run_that_is_refused_leaves_its_folder_as_it_was(there, tmp_path):
    (tmp_path / "rewards.py").write_text("def score(text): return 1.0\n")
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}="}) for n in range(8)))
    reward = {"path": f"{tmp_path / 'rewards.py'}:score"}
    task = {"kind": "data", "path": str(tmp_path / "data.jsonl"), "reward": reward}
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}
    out = tmp_path / "out"
    if there:
        out.mkdir()
        (out / ".keep").touch()
    with pytest.raises(JigsawError, match="it must be one of"):
        train(out, steps=1, task=task, model=model)
    assert [each.name for each in out.parent.glob("out/*")] == [".keep"] * there
    assert out.exists() == there
    (tmp_path / "rewards.py").write_text(
        "def score(prompts, completions, **k): return [1.0] * len(prompts)\n"
    )
    train(out, steps=1, task=task, model=model)
    assert len(metrics(out)) == 1


def test_dynamic_sampling_replaces_groups_that_all_got_the_same_reward(tmp_path):
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if int(ground_truth) % 2 else hash(solution_str) % 1000 / 1000\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(40)))
    task = {"kind": "data", "path": str(data), "reward": {"path": f"{reward}:score"}}
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}
    train(
        tmp_path / "run", task=task, model=model, steps=4, algorithm={"dynamic_sampling": {"max_rounds": 8}}
    )
    rows = metrics(tmp_path / "run")
    assert [row["rollout/groups_kept"] for row in rows] == [8] * 4
    assert all(row["rollout/rounds"] > 1 for row in rows)
