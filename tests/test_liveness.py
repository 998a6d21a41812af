"""Heartbeats, with a clock that the test moves and with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from jigsawrl.liveness import LONGEST_LOOK_S, Guard, Heartbeat, Silence, Watched

BEATS = """
import sys, time
from collections.abc import Callable
from pathlib import Path
from jigsawrl.liveness import Heartbeat
Heartbeat(Path(sys.argv[1]), 0.02)
while True:  # works for ever, and never comes back to say so
    sum(range(10**5))
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_process_that_is_heard_is_never_silent() -> None:
    clock = Clock()
    silence = Silence(10.0, clock)
    for _ in range(100):
        clock.now += 3
        assert not silence.too_long()
        silence.heard()


def test_silence_is_noticed_after_its_limit() -> None:
    clock = Clock()
    silence = Silence(10.0, clock)
    looks = 0
    while not silence.too_long():
        clock.now += 1
        looks += 1
    assert looks == 11


def test_time_in_which_the_watcher_was_stopped_does_not_count() -> None:
    for limit in (5.0, 120.0):
        clock = Clock()
        silence = Silence(limit, clock)
        clock.now += limit - 1 if limit <= LONGEST_LOOK_S else 0
        assert not silence.too_long()
        clock.now += 8 * 3600  # a night
        assert not silence.too_long()
        assert silence.seconds <= LONGEST_LOOK_S


def test_a_process_that_computes_beats_and_one_that_is_stopped_does_not(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    watched = Watched(beat, limit_s=0.5)
    assert not watched.is_silent(), "it has not begun yet"
    with subprocess.Popen([sys.executable, "-c", BEATS, str(beat)]) as process:
        try:
            until(lambda: beat.exists() and watched.last != b"", watched)
            seen = {watched.last}
            until(lambda: not seen.add(watched.last) and len(seen) > 5, watched)
            os.kill(process.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while not watched.is_silent():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGCONT)
            until(lambda: not watched.is_silent(), watched)
        finally:
            process.kill()


def until(true: Callable[[], bool], watched: Watched) -> None:
    deadline = time.monotonic() + 30
    watched.is_silent()
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
        watched.is_silent()


def test_a_heartbeat_stops_when_it_is_told_to(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "beat", 0.01)
    heart.stop()
    assert not heart.thread.is_alive()
    assert (tmp_path / "beat").stat().st_mode & 0o777 == 0o600


def test_a_guard_whose_thread_could_not_be_started_tries_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, pid = Guard(), os.getpid()
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            guard.watch(pid, tmp_path / "beat", 60.0)
    guard.watch(pid, tmp_path / "beat", 60.0)
    assert guard.thread is not None
    assert guard.thread.is_alive()
    guard.forget(pid)
