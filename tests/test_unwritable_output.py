"""Output that nobody can read: it never ends training, and a script that waits for an answer is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jigsawrl import streams

pytestmark = pytest.mark.slow

REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info=None):
    print("said on stdout \\u2713", flush=True)
    return float(len(solution_str))
"""
TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "warmup_steps": 0}
RUN: dict[str, Any] = {
    "name": "quiet",
    "steps": 2,
    "model": {"tiny": TINY},
    "task": {"kind": "data", "path": "sums.jsonl", "reward": {"path": "reward.py:reward"}},
    "rollout": {"prompts_per_step": 4, "samples": 2, "max_tokens": 4},
    "telemetry": {"tensorboard": False},
}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    yield folder
    shutil.rmtree(folder)


def write(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{i} + 1 =", "answer": f"{i + 1} ✓"} for i in range(8)]
    (folder / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "run.yaml").write_text(json.dumps(RUN))
    mix = {"workers": 1, "policy": "concurrent", "pipelines": {"a": {"run": "run.yaml"}}}
    (folder / "mix.yaml").write_text(json.dumps(mix))


def jigsaw(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """By a shell, which opens and closes what it says."""
    return subprocess.run(
        ["bash", "-c", f'jigsaw() {{ {sys.executable} -m jigsawrl run "$@"; }}; {command}'],
        cwd=folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(">&-", marks=pytest.mark.long),
        "<&- >&- 2>&-",
        ">/dev/full 2>/dev/full",
        pytest.param("2>&1 | head -1; exit ${PIPESTATUS[0]}", marks=pytest.mark.long),
    ],
    ids=["closed", "all closed", "full", "one line read"],
)
def test_training_goes_on_to_its_end(tmp_path: Path, output: str) -> None:
    write(tmp_path)
    done = jigsaw(tmp_path, f"jigsaw run.yaml --out out {output}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "model" / "config.json").exists()
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["reward/mean"] > 0 for row in rows)


def test_a_mix_goes_on_to_its_end_where_nothing_can_be_written(tmp_path: Path) -> None:
    write(tmp_path)
    done = jigsaw(tmp_path, "jigsaw mix.yaml --out out >/dev/full 2>&1")
    assert done.returncode == 0
    assert (tmp_path / "out" / "a" / "model" / "config.json").exists()


def full_pipe() -> tuple[int, int]:
    """Its ends. Nothing more goes into it until somebody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x")
    except BlockingIOError:
        os.set_blocking(write, True)
    return read, write


@pytest.mark.parametrize("file", ["run.yaml", "mix.yaml"])
def test_a_run_whose_output_nobody_reads_goes_on_and_ends_when_it_is_told_to(
    file: str, tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps({**RUN, "steps": 100_000}))
    (tmp_path / "reward.py").write_text(REWARD.replace("print", "len").replace(", flush=True", ""))
    read, stuck = full_pipe()
    program = "from jigsawrl import cli, streams; streams.PATIENCE_S = 1.0; cli.main()"
    command = [sys.executable, "-c", program, "run", file, "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=stuck, stderr=stuck) as run:
        try:
            deadline = time.monotonic() + 120
            while not list((tmp_path / "out").rglob("metrics.jsonl")):
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 130
        finally:
            run.kill()
            os.close(stuck)
            os.close(read)


def test_what_nobody_reads_is_lost_and_what_is_read_again_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 0.2)
    read, stuck = full_pipe()
    with os.fdopen(stuck, "w") as stream:
        log = streams.Forgiving(stream)
        log.is_log = True
        began = time.monotonic()
        for _ in range(1000):
            assert log.write("lost\n") == 5
        assert 0.2 <= time.monotonic() - began < 5
        os.read(read, 1 << 24)  # all of it
        log.write("read " * 1000)
        assert os.read(read, 1 << 16).decode() == "read " * 1000
    os.close(read)


def test_who_asked_for_an_answer_is_told_that_it_could_not_be_written(tmp_path: Path) -> None:
    write(tmp_path)
    done = jigsaw(tmp_path, "jigsaw run.yaml --dry-run --json >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "jigsaw: standard output cannot be written: No space left on device\n"


def test_names_of_any_characters_do_in_a_locale_that_has_none(tmp_path: Path) -> None:
    write(tmp_path)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = jigsaw(tmp_path, "jigsaw run.yaml --out größe-数", **plain)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "größe-数" / "model" / "config.json").exists()
    assert "into gr\\xf6\\xdfe-\\u6570" in done.stdout


def test_no_folder_for_temporary_files_and_no_home(short: Path) -> None:
    """As in a container whose root cannot be written, of which only the run's folder is mounted otherwise."""
    write(short)
    (short / "sitecustomize.py").write_text(
        "from jigsawrl import temporary\ntemporary.USUAL = ('/proc',)\n"
        "import os, tempfile\ntempfile._candidate_tempdir_list = lambda: [os.environ['TMPDIR'], '/proc']\n"
    )
    path = f"{short}:{os.environ.get('PYTHONPATH', '')}"
    command = "unset HOME; jigsaw mix.yaml --out out"
    done = jigsaw(short, command, TMPDIR="/proc/none", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert not list(short.glob(".jigsawrl*"))
    assert not list((short / "out").glob(".jigsawrl*"))
