"""The MPS daemon of a run: it is there when it is needed, and gone with whoever started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jigsawrl.runtime.mps import CONTROL, Mps, NoMps, wait_to_be_taken


def test_a_daemon_answers_when_it_is_started_and_leaves_nothing(control):
    mps = Mps()
    try:
        assert mps.servers() == [4711]
        assert all(Path(folder).is_dir() for folder in mps.environment.values())
        assert control in mps.folder.parents
    finally:
        mps.close()
    assert mps.keeper.returncode == 0
    mps.close()  # once more does no harm


@pytest.mark.parametrize("answers", [[0], [807, 807, 807, 0], [100]])
def test_who_is_refused_for_another_clients_mistake_waits_until_he_is_taken(answers, monkeypatch):
    monkeypatch.setattr("jigsawrl.runtime.mps.PAUSE_S", 0.0)
    left = iter(answers)
    wait_to_be_taken(lambda: next(left))
    assert not list(left)


def test_he_does_not_wait_forever(monkeypatch):
    monkeypatch.setattr("jigsawrl.runtime.mps.READY_S", 0.05)
    wait_to_be_taken(lambda: 807)


def test_a_daemon_ends_with_whoever_started_it_however_that_was(control):
    code = (
        "import tempfile; from jigsawrl.runtime.mps import Mps; "
        f"tempfile.tempdir = {str(control)!r}; print(Mps().keeper.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        keeper = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert select.select([keeper], [], [], 20)[0], "it goes on"
    os.close(keeper)


def test_without_the_program_there_is_no_daemon(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoMps, match=f"{CONTROL} is not installed"):
        Mps()


def test_a_daemon_that_does_not_come_up_is_given_up_with_its_last_words(control, monkeypatch):
    monkeypatch.setattr("jigsawrl.runtime.mps.PATIENCE_S", 0.3)
    (control.parent / "bin" / CONTROL).write_text("#!/bin/sh\necho no permission\nexit 1\n")
    with pytest.raises(NoMps, match=f"{CONTROL} does not answer: no permission"):
        Mps()
