"""Where nobody says how many threads a run has, it has as many as there are cores that others leave free."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import config, train

from jigsawrl.pipeline import threads
from jigsawrl.pipeline.threads import (
    CpuTimes,
    LoadAwareThreads,
    free_cores,
    load_aware_threads,
    read_cpu_times,
)

START = CpuTimes(cores=2, total=100.0, idle=40.0, own=10.0)
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is looked at whenever `adapt` is called."""
    monkeypatch.setattr(threads, "WINDOW_S", 0.0)


def after(idle: float, own: float, seconds: float = 1.0) -> CpuTimes:
    """A second later, in which two cores were idle and worked for this process for so long."""
    return CpuTimes(2, START.total + 2 * seconds, START.idle + idle, START.own + own)


@pytest.mark.parametrize(
    ("idle", "own", "free"),
    [(0.0, 2.0, 2.0), (1.0, 1.0, 2.0), (0.0, 1.0, 1.0), (0.0, 0.4, 0.4), (0.0, 0.0, 0.0), (0.1, 2.0, 2.0)],
    ids=["both ours", "one idle", "one taken", "beside four on two cores", "none", "ticks do not add up"],
)
def test_free_cores_are_those_that_were_idle_or_ours(idle: float, own: float, free: float) -> None:
    assert free_cores(START, after(idle, own)) == pytest.approx(free)


def test_nothing_is_known_before_time_has_passed_or_where_cores_came_or_went() -> None:
    assert free_cores(START, START) is None
    assert free_cores(START, CpuTimes(3, 103.0, 40.0, 11.0)) is None


@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 3)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_there_is_always_one_thread_and_never_more_than_there_may_be(
    moments: list[tuple[float, float]], most: int
) -> None:
    total, idle, own = 0.0, 0.0, 0.0
    readings = [CpuTimes(2, total, idle, own)]
    for waited, worked in moments:
        total, idle, own = total + 2.0, idle + waited, own + worked
        readings.append(CpuTimes(2, total, idle, own))
    following = LoadAwareThreads(most, iter(readings).__next__)
    torch.set_num_threads(most)
    for _ in moments:
        following.due = 0.0
        following.adapt()
        assert 1 <= torch.get_num_threads() <= most


def test_threads_follow_the_load_down_and_up_again(every_moment: None) -> None:
    moments = iter([START, after(0.0, 0.4), after(1.6, 0.8), after(2.0, 2.4, seconds=2.0)])
    torch.set_num_threads(2)
    following = LoadAwareThreads(2, lambda: next(moments, None))
    seen = []
    for _ in range(4):
        following.adapt()
        seen.append(torch.get_num_threads())
    assert seen == [1, 1, 2, 2]


def test_where_the_kernel_does_not_tell_threads_stay_as_they_are(
    every_moment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (None, "", "cpu 1 2 3 4\n", "cpu0 1 2\n", "cpu0 a b c d e f g h\n"):
        monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
        if text is not None:
            (tmp_path / "stat").write_text(text)
        assert read_cpu_times() is None
    torch.set_num_threads(2)
    LoadAwareThreads(2, read_cpu_times).adapt()
    assert torch.get_num_threads() == 2


@contextmanager
def others_on_every_core() -> Iterator[None]:
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    spinning = [
        subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_beside_busy_processes_on_every_core_one_thread_is_left() -> None:
    torch.set_num_threads(4)
    with others_on_every_core():
        following = LoadAwareThreads(4, read_cpu_times)
        deadline = time.monotonic() + PATIENCE_S
        while torch.get_num_threads() > 1 and time.monotonic() < deadline:
            torch.ones(1000).sum()
            following.adapt()
        assert torch.get_num_threads() == 1


def test_a_run_on_a_busy_machine_computes_with_one_thread_unless_it_was_told_how_many(
    every_moment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    monkeypatch.setattr(threads, "read_cpu_times", lambda: CpuTimes(4, 4.0 * next(seconds), 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    chosen: list[int] = []
    choose = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda number: (chosen.append(number), choose(number)))
    before = torch.get_num_threads()
    train(tmp_path / "free", steps=1, threads=None)
    assert chosen[0] == 4
    assert chosen[-2:] == [1, before]
    chosen.clear()
    train(tmp_path / "told", steps=1, threads=3)
    assert chosen[0] == 3
    assert chosen[-2:] == [3, before]


def test_the_number_of_threads_is_fixed_where_it_is_set_in_deterministic_mode_and_beside_a_gpu() -> None:
    assert load_aware_threads(config(threads=None), "cpu") is not None
    assert load_aware_threads(config(threads=2), "cpu") is None
    assert load_aware_threads(config(threads=None, deterministic=True), "cpu") is None
    assert load_aware_threads(config(threads=None), "cuda") is None
