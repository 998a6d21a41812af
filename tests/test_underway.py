"""One process at a time runs what is in a folder, whatever kind of run it holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jigsawrl import underway
from jigsawrl.errors import JigsawError
from jigsawrl.underway import is_under_way, refuse_inside_another, under_way

ME = f"process {os.getpid()} runs what is in it; let it end, stop it with 'kill {os.getpid()}', or choose another"
RUN = """
steps: 400
deterministic: true
model: {tiny: {layers: 1, hidden: 32, heads: 2, kv_heads: 2, warmup_steps: 2}}
task: {kind: arithmetic, max_number: 6, size: 49}
rollout: {prompts_per_step: 2, samples: 2, max_tokens: 4}
checkpoint: {every: 50}
telemetry: {tensorboard: false}
"""
PATIENCE_S = 90.0


def hold(folder: Path, held: multiprocessing.connection.Connection) -> None:
    with under_way(folder):
        held.send(os.getpid())
        held.recv()


@contextmanager
def another_process_at(folder: Path) -> Iterator[multiprocessing.Process]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(folder, there))
    process.start()
    try:
        assert here.poll(PATIENCE_S)
        assert here.recv() == process.pid
        yield process
    finally:
        process.kill()
        process.join()


def test_the_second_is_refused_with_the_name_of_the_first_and_free_to_go_on_after_it(tmp_path: Path) -> None:
    with under_way(tmp_path):
        assert is_under_way(tmp_path)
        with pytest.raises(JigsawError, match="^" + str(tmp_path)) as refused, under_way(tmp_path):
            pass
        assert ME in str(refused.value)
        assert is_under_way(tmp_path)
    assert not is_under_way(tmp_path)
    with under_way(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_kernel_takes_the_lock_from_the_dead(tmp_path: Path) -> None:
    with another_process_at(tmp_path) as process:
        with (
            pytest.raises(JigsawError, match=f"process {process.pid} runs what is in it"),
            under_way(tmp_path),
        ):
            pass
        process.kill()
        with under_way(tmp_path):  # perhaps a moment before the dead one has let go
            assert underway.holder_of(tmp_path) == underway.Holder(os.getpid(), os.uname().nodename)


def test_folders_made_for_nothing_are_gone_and_others_stay(tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match="refused"), under_way(tmp_path / "a" / "b"):
        raise JigsawError("refused")
    assert list(tmp_path.iterdir()) == []
    with under_way(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.yaml").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.yaml"]


def test_processes_that_look_keep_nobody_from_beginning(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_under_way(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for each in threads:
        each.start()
    for _ in range(50):
        with under_way(tmp_path):
            pass
    over.set()
    for each in threads:
        each.join()


def test_a_lock_file_that_a_dead_run_of_another_user_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / underway.LOCK).write_text('{"pid": 1, "host": "gone"}')
    (tmp_path / underway.LOCK).chmod(0o444)
    with under_way(tmp_path):
        assert is_under_way(tmp_path)


def test_a_holder_on_another_machine_is_named_with_it(tmp_path: Path) -> None:
    with under_way(tmp_path):
        (tmp_path / underway.LOCK).write_text(json.dumps({"pid": 7, "host": "gpu-3"}))
        said = r"process 7 on gpu-3 runs .* stop it with 'kill 7' on gpu-3"
        with pytest.raises(JigsawError, match=said), under_way(tmp_path):
            pass


def test_the_folder_of_one_pipeline_belongs_to_the_run_around_it(tmp_path: Path) -> None:
    with another_process_at(tmp_path) as process:
        said = f"belongs to {tmp_path}, which process {process.pid} runs"
        with pytest.raises(JigsawError, match=said):
            refuse_inside_another(tmp_path / "sums")
        process.kill()
        process.join()
        refuse_inside_another(tmp_path / "sums")
    with under_way(tmp_path):  # a comparison's own runs
        refuse_inside_another(tmp_path / "serial")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jigsawrl", "run", *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def wait_for_lines(file: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() or file.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{file} did not grow"
        time.sleep(0.01)


def end(process: subprocess.Popen[str]) -> None:
    with_it = process.poll() is None
    if with_it:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_of_two_processes_that_resume_one_run_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    first = start(tmp_path, "run.yaml", "--out", "out")
    try:
        wait_for_lines(tmp_path / "out" / "metrics.jsonl", 2, first)
    finally:
        end(first)
    two = [start(tmp_path, "run.yaml", "steps=100000", "--out", "out", "--resume") for _ in range(2)]
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any(each.poll() is not None for each in two):
            assert time.monotonic() < deadline, "both go on"
            time.sleep(0.01)
        (refused,) = [each for each in two if each.poll() is not None]
        (other,) = [each for each in two if each is not refused]
        said = refused.communicate()[1]
        assert refused.returncode == 2, said
        assert f"process {other.pid} runs what is in it; let it end, stop it with 'kill {other.pid}'" in said
        wait_for_lines(tmp_path / "out" / "metrics.jsonl", 4, other)
    finally:
        for each in two:
            end(each)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_pipeline_of_a_mix_and_the_same_pipeline_alone_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(RUN)
    (tmp_path / "mix.yaml").write_text("workers: 1\npipelines: {sums: {run: sums.yaml, steps: 100000}}\n")
    mix = start(tmp_path, "mix.yaml", "--out", "out")
    try:
        wait_for_lines(tmp_path / "out" / "sums" / "metrics.jsonl", 1, mix)
        alone = start(tmp_path, "sums.yaml", "--out", "out/sums", "--resume")
        said = alone.communicate(timeout=PATIENCE_S)[1]
        assert alone.returncode == 2, said
        assert f"out/sums: belongs to {tmp_path / 'out'}, which process {mix.pid} runs" in said
        os.kill(mix.pid, signal.SIGTERM)
        mix.communicate(timeout=PATIENCE_S)
    finally:
        end(mix)
    with another_process_at(tmp_path / "out" / "sums") as process:
        again = start(tmp_path, "mix.yaml", "--out", "out", "--resume")
        said = again.communicate(timeout=PATIENCE_S)[1]
        assert again.returncode == 2, said
        assert f"out/sums: process {process.pid} runs what is in it" in said
