"""Several workers as one: the first failure ends all of them at once, and is what the run says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kill import left_behind

PATIENCE_S = 90.0
RUN_FILE = """
name: gang
steps: 1000
workers: 2
threads: 1
device: cpu
model: {tiny: {layers: 1, hidden: 32, heads: 2, kv_heads: 1, warmup_steps: 0}}
task: {kind: arithmetic, max_number: 6, size: 49}
rollout: {prompts_per_step: 8, samples: 4, max_tokens: 6}
"""
WORKER_1 = '''
"""`jigsaw`, whose worker 1 does something else where the gang forms, while worker 0 waits for it."""
import sys, time
from jigsawrl.pipeline import actor_process, workers

started = workers.actor_in

def for_ever(*place):
    time.sleep(10**6)

def cannot(*place):
    raise OSError("a thread could not be started")

def actor_in(*arguments):
    rank = arguments[-3]
    if rank == 1:
        actor_process.join_the_others = DOES
    started(*arguments)

if __name__ == "__main__":
    workers.actor_in = actor_in
    from jigsawrl.cli import main
    sys.argv[0] = "jigsaw"
    main()
'''


def start(folder: Path, program: list[str], **environment: str) -> subprocess.Popen[bytes]:
    (folder / "run.yaml").write_text(RUN_FILE)
    command = [sys.executable, *program, "run", "run.yaml", "--out", "out"]
    (folder / "said").touch()
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )


def end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; whatever of it is left is an error, and is killed."""
    try:
        code = process.wait(PATIENCE_S)
        deadline = time.monotonic() + 30
        while left_behind(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left_behind(process.pid) == []
        return code
    finally:
        for pid in left_behind(process.pid):
            os.kill(int(pid), signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_worker_that_fails_while_the_gang_forms_ends_the_run_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(WORKER_1.replace("DOES", "cannot"))
    (temporary := tmp_path / "temporary").mkdir()
    process = start(tmp_path, ["fails.py"], TMPDIR=str(temporary))
    code = end(process)
    said = (tmp_path / "said").read_text()
    assert code not in (0, -signal.SIGKILL)
    assert "worker 1 failed: OSError: a thread could not be started" in said
    assert list(temporary.glob("jigsawrl-*")) == []


@pytest.mark.slow
@pytest.mark.long
def test_workers_that_wait_for_each_other_end_with_the_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WORKER_1.replace("DOES", "for_ever"))
    process = start(tmp_path, ["waits.py"])
    deadline = time.monotonic() + PATIENCE_S
    while not [pid for pid in left_behind(process.pid) if name_of(pid) == "actor1:gang"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    end(process)


def name_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_is_stopped_ends_the_run_within_a_bound_though_it_is_told_to_finish_its_step(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, ["-m", "jigsawrl"], JIGSAWRL_SILENT_S="5")
    steps = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (steps.exists() and steps.read_text()):
        assert time.monotonic() < deadline, (tmp_path / "said").read_text()
        time.sleep(0.02)
    (worker,) = [pid for pid in left_behind(process.pid) if name_of(pid) == "actor1:gang"]
    os.kill(int(worker), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert end(process) not in (0, -signal.SIGKILL)
    said = (tmp_path / "said").read_text()
    assert "worker 1 did not show that it was alive for 5 s, and was ended" in said
