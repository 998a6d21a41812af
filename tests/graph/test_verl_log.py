"""verl's console logs, as several versions write them."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl_logs import BAR, COLOURED, COMMAND, METRICS, NUMPY, PLAIN, RAY, log, read, step

from jigsawrl.errors import JigsawError
from jigsawrl.graph.reconstruct import reconstructed_lengths
from jigsawrl.graph.runs import read_runs
from jigsawrl.graph.verl_log import read_runs_in
from jigsawrl.graph.verl_trace import read_verl_log


@pytest.mark.parametrize(
    "line",
    [
        f"step:1 - {PLAIN}",
        f"{RAY}step:1 - {NUMPY}",
        f"{COLOURED}step:1 - {PLAIN}",
        f"Training Progress:  10%|\u2588 | 1/10\r{RAY}step:1 - {PLAIN} [repeated 2x across cluster]",
        f"{RAY}step:1 - {PLAIN}{BAR}",
        f"Training Progress:  10%|\u2588 | 1/10 [02:09<19:21, 129.0s/it]step:1 - {PLAIN}\r{BAR}",
        f"(WorkerDict pid=7) loading{COLOURED}step:1 - {PLAIN}\x1b[36m(pid=8)\x1b[0m done",
        f"[36m(TaskRunner pid=7)[0m step:1 - {PLAIN}[32m [repeated 2x across cluster][0m",
        f"^[[36m(TaskRunner pid=7)^[[0m step:1 - {PLAIN}^[[36m(TaskRunner pid=7)^[[0m bar",
        f"2025-06-01 10:00:00 INFO step:1 - {PLAIN}",
        f"> {RAY}step:1 - {PLAIN}",
        "step:1\n" + "\n".join(f" - {key}:{value}" for key, value in METRICS.items()),
        json.dumps(
            {"step": 1, "data": {key: float(value) for key, value in METRICS.items() if value != "nan"}}
        ),
    ],
)
def test_a_step_is_read_however_it_is_written(tmp_path, line):
    trace = read(tmp_path, "noise: no step here", line, "more noise")
    (found,) = trace.steps
    assert (found.step, found.gen, found.ref, found.update_actor) == (1, 59.0, 18.2, 35.6)
    assert found.seconds == 129.0
    assert trace.gpus == 8
    assert trace.model.name == "qwen3-4b"
    assert found.reconstructed
    assert len(found.lengths) == 1024
    assert found.lengths.mean() == pytest.approx(290.1, rel=0.01)
    assert found.lengths.max() == 4096


def test_every_step_is_read_from_a_log_whose_steps_are_glued_to_progress_bars(tmp_path):
    text = COMMAND + "\n" + "".join(f"{step(number)}{BAR}" for number in range(1, 153))
    (run,), _ = read_runs_in(log(tmp_path, text))
    assert list(run.steps) == list(range(1, 153))
    assert all(line.metrics["perf/throughput"] == 391.244 for (line,) in run.steps.values())


def test_debug_output_and_words_of_a_model_are_no_steps(tmp_path):
    trace = read(
        tmp_path,
        step(1),
        f"{RAY}[profile] step=2 window=1 | step: 103.43s | gen: 47.75s",
        f"{RAY}Let's think step by step:",
        f"{RAY}step: 1",
        f"{RAY}step:9 - multiply both sides: 4 - then add: 5",
        '{"step": 7, "loss": 0.5}',
        step(2),
    )
    assert [each.step for each in trace.steps] == [1, 2]
    assert trace.found == 2


def test_the_first_of_two_lines_of_a_step_counts_and_a_later_one_adds_what_it_lacks(tmp_path):
    first, later = (
        step(2).replace(" - perf/throughput:391.244", ""),
        "step:2 - perf/throughput:391.244 - val/x:1",
    )
    trace = read(tmp_path, step(1), first, later, step(3), step(3, gen=99.0))
    assert [(each.step, each.gen) for each in trace.steps] == [(1, 59.0), (2, 59.0), (3, 59.0)]
    assert trace.found == 3


def test_validation_alone_is_no_step(tmp_path):
    trace = read(
        tmp_path, f"{RAY}step:0 - val-core/gsm8k/acc:0.4 - val-aux/num_turns/mean:2.0", step(1), step(2)
    )
    assert ([each.step for each in trace.steps], trace.found) == ([1, 2], 2)


def test_a_step_that_makes_no_sense_is_left_out_and_named(tmp_path):
    lines = [step(1), step(2, gen="nan"), step(3, update_actor="inf"), step(4, step="-3.0"), step(5), step(6)]
    trace = read(tmp_path, *lines)
    assert ([each.step for each in trace.steps], trace.found) == ([1, 5, 6], 6)
    assert any("left out 3 of 6 steps" in doubt and "line 2" in doubt for doubt in trace.doubts)


def test_a_metric_that_is_not_needed_spoils_no_step(tmp_path):
    trace = read(
        tmp_path, *(step(each).replace("num_turns/mean:2.0", "num_turns/mean:nan") for each in (1, 2))
    )
    assert len(trace.steps) == 2
    assert trace.steps[0].turns == 1


def test_a_step_whose_line_is_cut_off_is_left_out(tmp_path):
    cut = step(2).partition("timing_s/ref")[0] + "timing_s/re"
    trace = read(tmp_path, step(1), cut, step(3), step(4))
    assert [each.step for each in trace.steps] == [1, 3, 4]
    assert "cut off" in trace.doubts[0]
    path = log(tmp_path, step(1))
    with open(path, "a") as file:
        file.write(step(2)[:150])
    (trace,) = read_verl_log(path)
    assert [each.step for each in trace.steps] == [1]


def test_a_last_line_without_its_line_feed_counts_if_it_is_whole(tmp_path):
    path = tmp_path / "qwen3-4b.log"
    path.write_text(f"{step(1)}\n{step(2)}")
    (trace,) = read_verl_log(path)
    assert [each.step for each in trace.steps] == [1, 2]


def test_sequences_are_held_against_the_tokens_and_the_median_step_counts(tmp_path):
    wrong = COMMAND.replace("rollout.n=4", "rollout.n=16")
    odd = step(3, total_num_tokens=40376300)
    trace = read(tmp_path, wrong, step(1), step(2), odd, step(4))
    assert trace.sequences == 1024
    assert [each.step for each in trace.steps] == [1, 2, 4]
    assert any("4,096 sequences" in doubt and "1,024" in doubt for doubt in trace.doubts)
    assert not read(tmp_path, COMMAND, step(1), step(2, total_num_tokens=404100)).doubts


def test_a_run_that_was_resumed_is_one_and_counts_each_step_once(tmp_path):
    trace = read(tmp_path, COMMAND, step(1), step(2), step(3), COMMAND, step(3, gen=61.0), step(4, gen=62.0))
    assert [(each.step, each.gen) for each in trace.steps] == [(1, 59.0), (2, 59.0), (3, 59.0), (4, 62.0)]
    again = f"{COMMAND.replace('n=4', 'n=4.0')} actor_rollout_ref.actor.fsdp_config.param_offload=true"
    trace = read(tmp_path, COMMAND, step(1), step(2), again, step(3), step(4))
    assert [each.step for each in trace.steps if each.first] == [1, 3]


@pytest.mark.parametrize("between", [(), (COMMAND,), (COMMAND.replace("=256", "=128"),)])
def test_two_jobs_in_one_log_are_two_runs(tmp_path, between):
    later = [step(each, gen=30.0 + each) for each in (1, 2, 3)]
    one, two = read_verl_log(log(tmp_path, COMMAND, step(1), step(2), *between, *later))
    assert [one.name, two.name] == ["gsm8k_qwen3-4b-1", "gsm8k_qwen3-4b-2"]
    assert [each.gen for each in one.steps] == [59.0, 59.0]
    assert [each.gen for each in two.steps] == [31.0, 32.0, 33.0]
    assert "2 runs" in one.doubts[-1]
    assert "2 runs" in two.doubts[-1]


def test_jobs_with_other_settings_are_two_runs_even_if_their_steps_go_on(tmp_path):
    other = COMMAND.replace("Qwen3-4B", "Qwen3-8B")
    one, two = read_verl_log(log(tmp_path, COMMAND, step(1), step(2), other, step(3), step(4)))
    assert (one.model.name, two.model.name) == ("qwen3-4b", "qwen3-8b")


@pytest.mark.parametrize(
    "lines",
    [
        ("(FullyAsyncTaskRunner pid=3) hello", step(1)),
        (step(1), f"{step(2)} - fully_async/count/total_generated_samples:64.0"),
        (f"{step(1)} - timing_s/wait_prev_gen:3.1", step(2)),
        (f"{step(1)} - timing_s/sync_rollout_weights:0.4", step(2)),
        (COMMAND.replace("verl.trainer.main_ppo", "recipe.one_step_off_policy.async_main_ppo"), step(1)),
        (f"{RAY}{{'actor_rollout_ref': {{'hybrid_engine': False,", f"{RAY} 'data': {{}}}}", step(1)),
        (f"{COMMAND} actor_rollout_ref.hybrid_engine=False", step(1)),
        (f"{RAY}{{'async_training': {{'staleness_threshold': 8.0}}}}", step(1)),
    ],
)
def test_a_log_of_an_asynchronous_trainer_is_refused_with_the_reason(tmp_path, lines):
    with pytest.raises(JigsawError, match="asynchronous trainer") as error:
        read_verl_log(log(tmp_path, *lines))
    assert "gsm8k_qwen3-4b.log" in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


def test_a_synchronous_run_before_or_after_an_asynchronous_one_is_read(tmp_path):
    started = "(FullyAsyncTaskRunner pid=3) [ASYNC MAIN] Starting fully async PPO training..."
    asynchronous = [started, *(f"{step(number)} - fully_async/x:1" for number in (2, 3))]
    synchronous = [COMMAND, *(step(number) for number in (1, 2))]
    for lines in ((*synchronous, *asynchronous), (*asynchronous, *synchronous)):
        trace = read(tmp_path, *lines)
        assert [each.step for each in trace.steps] == [1, 2]
        assert any("left out" in doubt and "asynchronous" in doubt for doubt in trace.doubts)


@pytest.mark.parametrize(
    "command",
    [
        f"{COMMAND} actor_rollout_ref.rollout.mode=async trainer.experiment_name=one_step_off_baseline",
        COMMAND.replace("+ python3", "+ cd /data/fully_async_runs && python3"),
    ],
)
def test_what_only_sounds_asynchronous_is_read(tmp_path, command):
    assert len(read(tmp_path, command, step(1), step(2)).steps) == 2


def test_a_gzipped_log_is_read_and_one_that_breaks_off_as_far_as_it_goes(tmp_path):
    noise = random.Random(0).randbytes(2000).hex()
    text = "\n".join([COMMAND, *(step(each) + f"\n{noise[:: each + 1]}" for each in range(1, 21))]).encode()
    whole, torn = tmp_path / "qwen3-4b.log.gz", tmp_path / "torn_qwen3-4b.log.gz"
    whole.write_bytes(gzip.compress(text))
    torn.write_bytes(gzip.compress(text)[:3000])
    (trace,) = read_verl_log(whole)
    assert (trace.name, len(trace.steps)) == ("qwen3-4b", 20)
    (trace,) = read_verl_log(torn)
    assert trace.name == "torn_qwen3-4b"
    assert 1 < len(trace.steps) < 20
    assert "breaks off" in trace.doubts[-1]


def test_a_file_that_cannot_be_used_ends_no_fit_of_others(tmp_path):
    log(tmp_path, step(1), step(2))
    log(tmp_path, "nothing", name="notes.txt")
    log(tmp_path, step(1, gen="nan"), name="nan_qwen3-4b.log")
    log(tmp_path, f"{step(1)} - fully_async/x:1", name="async_qwen3-4b.log")
    (tmp_path / "torn_qwen3-4b.log.gz").write_bytes(gzip.compress(b"step")[:9])
    traces, left_out = read_runs(tmp_path)
    assert [trace.name for trace in traces] == ["gsm8k_qwen3-4b"]
    assert len(left_out) == 4
    for name in ("notes.txt", "nan_qwen3-4b.log", "async_qwen3-4b.log", "torn_qwen3-4b.log.gz"):
        assert any(name in reason for reason in left_out)
    (tmp_path / "gsm8k_qwen3-4b.log").unlink()
    with pytest.raises(JigsawError, match="3 other logs be fitted") as error:
        read_runs(tmp_path)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        (["hello", "global_step:1 - x:2"], "none of its 2 lines"),
        (["hello", "step:1 - actor/loss:1.0"], "line 2"),
        (["a", "b", f"step:1 - {PLAIN}".replace("gen:59.0", "gen:-4.0")], "line 3"),
        (["a", f"step:1 - {PLAIN}".replace("gen:59.0", "gen:nan")], "line 2"),
        ([f"step:1 - {PLAIN}".replace("gen:59.0", "gen:soon")], "line 1"),
    ],
)
def test_a_log_that_cannot_be_used_names_its_line(tmp_path, lines, said):
    with pytest.raises(JigsawError) as error:
        read_verl_log(log(tmp_path, *lines))
    assert "gsm8k_qwen3-4b.log" in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


def test_a_log_without_a_model_says_how_to_name_it(tmp_path):
    with pytest.raises(JigsawError, match="qwen3-4b"):
        read_verl_log(log(tmp_path, f"step:1 - {PLAIN}", name="train.log"))


def test_bytes_that_are_no_text_are_no_crash(tmp_path):
    path = tmp_path / "qwen3-4b.log"
    path.write_bytes(bytes(range(256)) * 50)
    with pytest.raises(JigsawError):
        read_verl_log(path)
    path.write_bytes(bytes(range(256)) * 50 + f"\n{step(1)}\n".encode() + b"\x00" * 3_000_000)
    assert len(read_verl_log(path)[0].steps) == 1


def test_an_endless_line_is_not_kept_and_what_follows_is_read(tmp_path):
    trace = read(tmp_path, "x" * 5_000_000 + step(1), f"\r{BAR}" * 10_000, step(2), step(3))
    assert [each.step for each in trace.steps] == [2, 3]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 600), st.floats(0, 1), st.integers(2, 9000), st.floats(0, 1), st.floats(0, 0.6))
def test_made_up_lengths_keep_mean_and_bounds(count, where, longest, low, clipped):
    shortest = 1 + low * (longest - 1) / 2
    mean = shortest + where * (longest - shortest)
    lengths = reconstructed_lengths(count, mean, longest, shortest, clipped)
    assert len(lengths) == count
    assert lengths.min() >= np.floor(shortest)
    assert lengths.max() <= longest
    if count > 20 and 0.05 < where < 0.95:
        assert lengths.mean() == pytest.approx(mean, rel=0.05, abs=1)


def test_made_up_lengths_have_the_clipped_share():
    lengths = reconstructed_lengths(1024, 1360, 8192, 100, 0.012)
    assert (lengths >= 8190).mean() == pytest.approx(0.012, abs=0.005)
    assert lengths.mean() == pytest.approx(1360, rel=0.01)
    assert 500 < np.median(lengths) < 1200
