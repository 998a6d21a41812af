"""A run whose terminal closes is saved and clears up as after `kill`; under `nohup` it goes on to its end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from mixes import (
    CALC,
    MARK,
    SUMS,
    Command,
    Results,
    poll,
    result,
    run_here,
    write_mix,
)

pytestmark = pytest.mark.slow

ENDLESS = {**SUMS, "steps": 100_000, "checkpoint": {"every": 100_000}}


@contextmanager
def in_terminal(file: Path, out: Path, *options: str, nohup: bool = False) -> Iterator[tuple[Command, int]]:
    """`jigsaw run` as the first process of a terminal, and the terminal's other side: closing that hangs up."""
    mark, (ours, theirs) = uuid.uuid4().hex, os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "jigsawrl", "run", str(file), "--out", str(out), *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
        env={**os.environ, MARK: mark, "TMPDIR": str(short(file.parent)), "TERM": "xterm"},
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    command = Command(process, mark, out, file.parent)
    try:
        yield command, ours
    finally:
        command.kill_all()
        process.wait()
        with suppress(OSError):
            os.close(ours)


def wait_for_steps(command: Command, terminal: int, metrics: Path, steps: int = 1) -> None:
    """Reads what is shown meanwhile, as a terminal does."""

    def there() -> bool:
        with suppress(BlockingIOError, OSError):
            os.read(terminal, 1 << 16)
        return metrics.exists() and metrics.read_text().count("\n") >= steps

    command.wait_for(there, "a step")


def short(folder: Path) -> Path:
    """A folder for temporary files by a name in which there is room for sockets."""
    named = Path(tempfile.gettempdir(), f"tests-{uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex[:8]}")
    named.mkdir(exist_ok=True)
    return named


def assert_nothing_temporary_is_left(folder: Path) -> None:
    assert list(short(folder).iterdir()) == []
    short(folder).rmdir()


def test_a_pipeline_is_saved_when_its_terminal_closes(tmp_path: Path) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "out"
    file.write_text(json.dumps({**ENDLESS, "workers": 2}))
    with in_terminal(file, out) as (command, terminal):
        wait_for_steps(command, terminal, out / "metrics.jsonl")
        os.close(terminal)
        command.wait_for(lambda: command.process.poll() is not None, "its end")
        assert command.process.returncode == 130
        poll(lambda: not command.alive(), "processes are left")
    (saved,) = (out / "checkpoints").iterdir()
    made = (out / "metrics.jsonl").read_text().count("\n")
    assert saved.name == f"step-{made:06d}"
    assert_nothing_temporary_is_left(tmp_path)


def test_a_mix_is_saved_when_its_terminal_closes_and_resume_goes_on(alone: Results, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = {**CALC, "checkpoint": {"every": 1000}, "task": {**CALC["task"], "latency": 0.5}}
    mix = write_mix(tmp_path, "rlix", prompt=True, a=SUMS, b=slow)
    with in_terminal(mix, out) as (command, terminal):
        wait_for_steps(command, terminal, out / "b" / "metrics.jsonl")
        os.close(terminal)
        command.wait_for(lambda: command.process.poll() is not None, "its end")
        assert command.process.returncode == 130
        command.assert_nothing_is_left()
    assert list((out / "b" / "checkpoints").iterdir())
    assert_nothing_temporary_is_left(tmp_path)
    run_here(
        write_mix(tmp_path, "rlix", prompt=True, a=SUMS, b={**CALC, "checkpoint": {"every": 1000}}),
        out,
        resume=True,
    )
    assert {name: result(out / name) for name in "ab"} == alone


@pytest.mark.long
def test_under_nohup_a_mix_goes_on_without_its_terminal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "concurrent", a={**SUMS, "steps": 30}, b={**SUMS, "steps": 30})
    with in_terminal(mix, out, nohup=True) as (command, terminal):
        wait_for_steps(command, terminal, out / "a" / "metrics.jsonl")
        os.close(terminal)
        command.signal(signal.SIGHUP)
        command.wait_for(lambda: command.process.poll() is not None, "its end")
        assert command.process.returncode == 0
        command.assert_nothing_is_left()
    assert_nothing_temporary_is_left(tmp_path)
    assert all((out / name / "model" / "config.json").exists() for name in "ab")


@pytest.mark.long
def test_a_mix_that_is_hung_up_while_it_is_set_up_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "concurrent", a=ENDLESS, b=ENDLESS)
    with in_terminal(mix, out) as (command, terminal):
        command.wait_for(lambda: len(command.alive()) > 2, "a fork server")
        os.close(terminal)
        command.wait_for(lambda: command.process.poll() is not None, "its end")
        assert command.process.returncode == 130
        command.assert_nothing_is_left()
    assert_nothing_temporary_is_left(tmp_path)
