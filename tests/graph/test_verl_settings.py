"""Settings of verl runs: by their full keys, from the command line and from the resolved settings."""

from __future__ import annotations

from pprint import pformat

import pytest
from verl_logs import COMMAND, RAY, log, read, step

from jigsawrl.errors import JigsawError
from jigsawrl.graph.verl_trace import read_verl_log

RESOLVED = {
    "actor_rollout_ref": {
        "actor": {
            "_target_": "verl.workers.config.FSDPActorConfig",
            "checkpoint": {"load_contents": ["model", "optimizer", "extra"], "path": None},
            "fsdp_config": {"param_offload": False, "optimizer_offload": False, "forward_prefetch": False},
            "megatron": {"param_offload": False, "tensor_model_parallel_size": 8},
            "optim": {"betas": [0.9, 0.999], "lr": 1e-06, "override_optimizer_config": None},
            "rollout_n": 5,
        },
        "hybrid_engine": True,
        "model": {"path": "/models/Qwen2.5-7B-Instruct", "use_remove_padding": True},
        "ref": {
            "fsdp_config": {"param_offload": True},
            "megatron": {"param_offload": True, "tensor_model_parallel_size": 8},
        },
        "rollout": {
            "agent": {"num_workers": 8, "default_agent_loop": "single_turn_agent"},
            "gpu_memory_utilization": 0.6,
            "n": 5,
            "name": "vllm",
            "tensor_model_parallel_size": 1,
            "val_kwargs": {"n": 30, "temperature": 0},
        },
    },
    "critic": {"model": {"path": "/models/Qwen3-32B", "fsdp_config": {"param_offload": True}}},
    "data": {"max_response_length": 1024, "train_batch_size": 64, "val_batch_size": 999},
    "reward_model": {
        "enable": True,
        "model": {"path": "/models/Qwen3-14B", "fsdp_config": {"param_offload": True}},
        "n_gpus_per_node": 16,
        "nnodes": 3,
        "rollout": {"gpu_memory_utilization": 0.9, "n": 77, "tensor_model_parallel_size": 8},
    },
    "trainer": {"n_gpus_per_node": 4, "nnodes": 1, "logger": ["console", "wandb"]},
}
NUMBERS = {"total_num_tokens": round(320 * 394.3), "throughput": 320 * 394.3 / (129 * 4)}


def block(settings: object = RESOLVED, prefix: str = RAY) -> list[str]:
    """As verl prints them: `pprint`, and Ray's prefix before each line."""
    return [f"{prefix}{line}" for line in pformat(settings).splitlines()]


def steps(*numbers: int) -> list[str]:
    return [step(number, **NUMBERS) for number in numbers]


def check(trace) -> None:
    assert trace.model.name == "qwen2.5-7b"
    assert (trace.samples, trace.tp, trace.gpus, trace.sequences) == (5, 1, 4, 320)
    assert (trace.memory_share, trace.max_tokens, trace.offloaded) == (0.6, 1024, False)
    assert not trace.assumed
    assert not trace.doubts


@pytest.mark.parametrize(
    "prefix", [RAY, "", "\x1b[36m(main_task pid=7, ip=10.0.0.1)\x1b[0m ", "[36m(TaskRunner pid=7)[0m "]
)
def test_settings_count_by_their_full_keys(tmp_path, prefix):
    check(read(tmp_path, *block(prefix=prefix), *steps(1, 2, 3), name="run.log"))


def test_settings_on_one_line_and_with_double_quotes_are_read_too(tmp_path):
    check(read(tmp_path, f"{RAY}{RESOLVED}", *steps(1, 2), name="run.log"))
    check(read(tmp_path, str(RESOLVED).replace("'", '"'), *steps(1, 2), name="run.log"))


def test_what_others_print_into_the_settings_is_none_of_them(tmp_path):
    lines = []
    for number, line in enumerate(block()):
        lines.append(line)
        if number % 3 == 0:
            lines += [
                f"(WorkerDict pid=9)                        'n': {number},",
                f"{RAY}/usr/lib/python3/site-packages/x.py:7: UserWarning: rollout.n': 9 is deprecated",
                f"{RAY}  warnings.warn('n': 8)",
                "ray::TaskRunner 'tensor_model_parallel_size': 2",
            ]
        if number % 4 == 1:
            lines[-1] += f"\x1b[36m(pid=55)\x1b[0m {{'actor_rollout_ref': {{'rollout': {{'m': {number}}}}}}}"
    check(read(tmp_path, *lines, *steps(1, 2), name="run.log"))


def test_settings_that_follow_lines_that_were_lost_keep_their_keys(tmp_path):
    lost = ("'critic'", "'betas'", "'checkpoint'", "'reward_model'")
    lines = [line for line in block() if not any(each in line for each in lost)]
    check(read(tmp_path, *lines, *steps(1, 2), name="run.log"))


def test_debug_output_that_looks_like_settings_is_none(tmp_path):
    debug = f"{RAY}[debug stats] {{'rollout_tokens/min': 161, 'rollout_tokens/n': 1024}}"
    bare = f"{RAY}{{'n': 1024, 'rollout': {{'n': 1024}}, 'actor_rollout_ref.rollout.n': 1024}}"
    trace = read(tmp_path, COMMAND, debug, bare, step(1), debug, bare, step(2))
    assert (trace.samples, trace.sequences, trace.doubts) == (4, 1024, ())


def test_later_overrides_on_the_command_line_win_and_the_resolved_settings_win_over_both(tmp_path):
    more = f"{COMMAND} ++actor_rollout_ref.rollout.tensor_model_parallel_size='8' +actor_rollout_ref.x.n=7"
    assert read(tmp_path, more, step(1), step(2)).tp == 8
    assert read(tmp_path, *block(), more, *steps(1, 2), name="run.log").tp == 1


def test_a_command_that_goes_over_several_lines_is_one(tmp_path):
    lines = COMMAND.replace(" data.", " \\\n    data.").replace(" actor_", " \\\n    actor_")
    trace = read(tmp_path, f"PYTHONUNBUFFERED=1 {lines} \\", "    $@", step(1), step(2), name="run.log")
    assert (trace.model.name, trace.samples, trace.tp, trace.gpus) == ("qwen3-4b", 4, 4, 8)
    assert trace.assumed == frozenset()


def test_lines_that_pretend_to_be_commands_take_no_time(tmp_path):
    endless = ["python \\"] * 20_000 + ["python " + 'data.a=" ' * 100_000]
    assert read(tmp_path, *endless, "", COMMAND, step(1), step(2), name="run.log").tp == 4


def test_variables_of_a_script_that_is_only_shown_are_no_values(tmp_path):
    shown = "python3 -m verl.trainer.main_ppo data.train_batch_size=${BATCH} actor_rollout_ref.rollout.n=$N"
    trace = read(tmp_path, shown, step(1), step(2))
    assert (trace.samples, trace.sequences) == (1, 1024)


@pytest.mark.parametrize("engine", ["fsdp_config", "megatron"])
def test_offload_is_that_of_the_actor(tmp_path, engine):
    actor = RESOLVED["actor_rollout_ref"]["actor"]
    on = {**actor, engine: {"param_offload": True}}
    changed = {**RESOLVED, "actor_rollout_ref": {**RESOLVED["actor_rollout_ref"], "actor": on}}
    assert read(tmp_path, *block(changed), *steps(1, 2), name="run.log").offloaded
    override = f"{COMMAND} actor_rollout_ref.ref.{engine}.param_offload=True"
    assert not read(tmp_path, override, step(1), step(2)).offloaded


def test_what_nothing_tells_is_assumed_and_said(tmp_path):
    lines = [step(each).replace(" - perf/throughput:391.244", "") for each in (1, 2)]
    trace = read(tmp_path, *lines)
    assert (trace.gpus, trace.tp, trace.assumed) == (8, 2, frozenset({"gpus", "tp"}))


def test_a_mixture_of_experts_is_refused_whatever_its_log_is_called(tmp_path):
    with pytest.raises(JigsawError, match="only dense models"):
        read(tmp_path, COMMAND.replace("Qwen3-4B", "Qwen3-30B-A3B"), step(1), step(2), name="qwen3-4b.log")


def test_a_model_in_the_cache_of_the_hub_is_known(tmp_path):
    path = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218"
    (trace,) = read_verl_log(
        log(tmp_path, COMMAND.replace("/models/Qwen3-4B", path), step(1), name="run.log")
    )
    assert trace.model.name == "qwen3-8b"
