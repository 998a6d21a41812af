"""What a share is on this machine, who holds it, and what a run does where nobody can."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.runtime import shares as shares_module
from jigsawrl.runtime.cores import Threads, pin
from jigsawrl.runtime.mps import CONTROL, Mps
from jigsawrl.runtime.shares import (
    NO_GAPS,
    Cores,
    Follower,
    Gpu,
    Gpus,
    NoGpu,
    Sharer,
    Shares,
    divided,
    shares_here,
    write_note,
)
from jigsawrl.runtime.start import following

SIXTEEN = tuple(range(16))
H200 = Gpu("NVIDIA H200", sms=132, memory=139 << 30, units=16, ratio=3.9)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# What a share comes to


@st.composite
def shares_of_one_worker(draw: st.DrawFn) -> list[float]:
    """Up to sixteen that sum to at most 1, some of them tiny."""
    weights = draw(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=16))
    total = sum(weights) * draw(st.floats(1.0, 2.0))
    return [weight / total for weight in weights]


@given(shares_of_one_worker())
def test_parts_of_one_gpu_never_overlap_and_sum_to_at_most_all(shares):
    parts = divided(SIXTEEN, shares)
    used = [unit for part in parts for unit in part]
    assert len(used) == len(set(used))
    assert set(used) <= set(SIXTEEN)
    for part in parts:
        assert part
        assert all(b == a + 1 for a, b in pairwise(part))


@given(st.integers(1, 15))
def test_two_processes_that_make_the_same_split_get_the_two_halves_of_it(level):
    first, second = divided(SIXTEEN, [level / 16, 1 - level / 16])
    assert len(first) == level
    assert sorted(first + second) == list(SIXTEEN)


def test_the_same_shares_are_the_same_units_whoever_came_first():
    few, many = divided(SIXTEEN, [0.25, 0.75])
    assert (few, many) == (SIXTEEN[:4], SIXTEEN[4:])
    assert divided(SIXTEEN, [0.75, 0.25]) == [many, few]


@given(shares_of_one_worker())
def test_a_share_is_met_to_within_a_step_unless_it_or_another_is_less_than_one(shares):
    for part, share in zip(divided(SIXTEEN, shares), shares, strict=True):
        if min(shares) >= 1 / 16:
            assert abs(len(part) - 16 * share) <= 1


def test_shares_of_more_than_a_whole_worker_overlap_as_little_as_they_must():
    assert divided(SIXTEEN, [0.5, 1.0]) == [SIXTEEN[:8], SIXTEEN]  # the first one waits for its tools
    assert divided((0,), [0.5, 0.25, 0.25]) == [(0,)] * 3


def test_a_worker_with_nobody_on_it_is_not_divided():
    assert divided(SIXTEEN, []) == Cores([(0, 1)], {}).parts(0, []) == []
    assert Gpus([H200], {}).parts(0, []) == []


def test_on_a_cpu_those_on_a_worker_get_cores_of_their_own_while_there_are_enough():
    cores = Cores([(0, 1, 2, 3), (4,)], {})
    assert cores.parts(0, [Sharer(0.5, rollout=True), Sharer(0.25), Sharer(0.25, rollout=True)]) == [
        (0, 1),
        (2,),
        (3,),
    ]
    assert cores.parts(1, [Sharer(0.5, rollout=True)] * 2) == [(4,), (4,)]
    assert (cores.device(1), cores.threads((0, 1))) == ("cpu", 2)


def test_on_a_gpu_a_training_keeps_to_its_part_and_rollouts_have_all_of_it():
    gpus = Gpus([H200], {})
    parts = gpus.parts(0, [Sharer(0.125, rollout=True), Sharer(0.625), Sharer(0.25, rollout=True)])
    assert parts == [SIXTEEN, SIXTEEN[6:], SIXTEEN]


def test_trainings_in_a_process_with_others_decoding_and_those_that_must_be_exact_have_all_of_a_gpu():
    gpus = Gpus([H200], {})
    adapters, exact = Sharer(0.625, base="model"), Sharer(0.25, exact=True)
    assert gpus.parts(0, [Sharer(0.125), adapters, exact]) == [SIXTEEN[:2], SIXTEEN, SIXTEEN]


def test_a_rollout_that_is_confined_has_the_half_of_a_gpu_that_trainings_have_last():
    gpus = Gpus([H200], {})
    ahead, behind = Sharer(0.25, rollout=True, confined=True), Sharer(0.25, rollout=True)
    assert gpus.parts(0, [ahead, Sharer(0.5), behind]) == [SIXTEEN[:8], SIXTEEN[8:], SIXTEEN]
    assert gpus.parts(0, [ahead, behind]) == [SIXTEEN[:8], SIXTEEN], "equal shares are its own matter"


def test_who_is_confined_has_all_of_a_gpu_while_nobody_else_works_and_where_nothing_is_held():
    gpus = Gpus([H200], {})
    waits = Sharer(0.5, rollout=True, works=False, confined=True)
    assert gpus.parts(0, [replace(waits, works=True), Sharer(0.5, works=False)]) == [SIXTEEN] * 2
    assert gpus.parts(0, [waits, Sharer(0.5, rollout=True)]) == [SIXTEEN[:8], SIXTEEN], (
        "it comes back to its half"
    )
    for free in (replace(waits, exact=True), replace(waits, base="model")):
        assert gpus.parts(0, [free, Sharer(0.5)])[0] == SIXTEEN
    whole = Gpus([H200], {}, "none here")
    assert whole.parts(0, [waits, Sharer(0.5)]) == [whole.workers[0]] * 2


def test_equal_shares_of_a_gpu_are_left_to_the_gpu():
    gpus = Gpus([H200], {})
    assert gpus.parts(0, [Sharer(0.25)] * 4) == [SIXTEEN] * 4
    assert gpus.parts(0, [Sharer(1.0)]) == [SIXTEEN]


def test_shares_of_those_who_wait_do_not_count():
    gpus = Gpus([H200], {})
    waits = Sharer(0.25, rollout=True, works=False)
    assert gpus.parts(0, [waits, Sharer(0.5), Sharer(0.5, rollout=True)]) == [SIXTEEN] * 3
    assert gpus.parts(0, [waits, Sharer(0.75), Sharer(0.25, rollout=True)]) == [SIXTEEN, SIXTEEN[4:], SIXTEEN]
    assert gpus.parts(0, [Sharer(0.75, works=False), Sharer(0.25)]) == [SIXTEEN] * 2


def test_whoever_is_not_alone_on_a_gpu_leaves_room():
    gpus = Gpus([H200], {})
    rollout, training = Sharer(0.25, rollout=True), Sharer(0.5)
    assert gpus.yielding([rollout]) == [False]
    assert gpus.yielding([rollout, training]) == [True, True]
    assert gpus.yielding([rollout, rollout]) == [True, True]
    waits = Sharer(0.25, rollout=True, works=False)
    assert gpus.yielding([rollout, waits]) == [False, True], (
        "one waits, and should find room made when it comes back"
    )
    assert gpus.yielding([]) == []


def test_pipelines_that_decode_in_one_batch_are_no_company_for_each_other():
    gpus = Gpus([H200], {})
    one, other = Sharer(0.5, rollout=True, base="model"), Sharer(0.5, rollout=True, base="another")
    assert gpus.yielding([one, one]) == [False, False]
    assert gpus.yielding([one, one, other]) == [True, True, True]


def test_nobody_leaves_room_where_those_on_a_worker_take_turns_or_have_cores():
    crowd = [Sharer(0.5, rollout=True), Sharer(0.5)]
    assert Gpus([H200], {}, "none here").yielding(crowd) == [False, False]
    assert Cores([(0, 1)], {}).yielding(crowd) == [False, False]


# What a run says of it


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        (
            Cores([(0,), (1,)], {}),
            "a worker is 1 of this machine's cores, a share is a number of them",
        ),
        (
            Gpus([H200], {}),
            "a worker is GPU 0 (NVIDIA H200, 132 SMs); a training's share is a green context, in steps of 8 SMs, "
            "under MPS (checked: a quarter takes 3.9 times as long as all)",
        ),
        (
            Gpus([H200, H200], {}, without_mps=f"{CONTROL} is not installed"),
            "a worker is one of 2 GPUs (NVIDIA H200, 132 SMs); shares are not held, and those on it take turns "
            f"(no MPS: {CONTROL} is not installed)",
        ),
        (
            Gpus([Gpu("Old", 40, 8 << 30, undivided="the package cuda-bindings is not installed")], {}),
            "a worker is GPU 0 (Old, 40 SMs); shares are not held, and those on it mix as they come, under MPS "
            "(the package cuda-bindings is not installed)",
        ),
        (
            Gpus([replace(H200, memory=150 * 10**9, taken=35 * 10**9)], {}, without_mps="none here"),
            "a worker is GPU 0 (NVIDIA H200, 132 SMs; others have 35 GB of its memory, and memory: 100 would leave "
            "it to them); shares are not held, and those on it take turns (no MPS: none here)",
        ),
    ],
)
def test_a_run_says_in_one_sentence_what_a_share_is(shares: Shares, sentence):
    assert shares.describe() == sentence


def test_without_mps_everybody_has_the_whole_gpu_in_his_turn():
    gpus = Gpus([H200], {}, without_mps="none here")
    assert gpus.parts(0, [Sharer(0.25), Sharer(0.75)]) == [(0,), (0,)]


@pytest.mark.parametrize(
    ("called", "known"),
    [("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"), ("NVIDIA H100 80GB HBM3", "h100"), ("Other", "a100")],
)
def test_a_gpu_is_planned_with_by_its_name_and_its_own_memory(called, known):
    worker = Gpus([Gpu(called, sms=132, memory=100 << 30)], {}).hardware()
    assert (worker.name, worker.device_bytes) == (known, 0.9 * (100 << 30))


def test_a_machine_without_a_gpu_shares_its_cores(monkeypatch):
    monkeypatch.setattr(shares_module, "has_gpu_driver", lambda: False)
    with shares_here(1, "auto") as shares:
        assert isinstance(shares, Cores)
        assert shares.workers == [tuple(sorted(os.sched_getaffinity(0)))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_cannot_use_is_told_of_or_refused_if_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(shares_module, "has_gpu_driver", lambda: True)
    with shares_here(1, "auto") as shares:
        assert shares.describe().endswith("a share is a number of them (no GPU is used: torch sees no GPU)")
    with pytest.raises(JigsawError, match="device: cuda is asked for, but torch sees no GPU"):
        shares_here(1, "cuda").__enter__()


# How an actor learns of it


class Moves:
    """Where an actor's work was moved to."""

    units = 16

    def __init__(self) -> None:
        self.log: list[tuple[int, ...]] = []

    def move_to(self, units: range) -> None:
        self.log.append(tuple(units))


def test_an_actor_follows_its_note_and_only_moves_when_that_changes(tmp_path):
    gpus, note = Gpus([H200], {}), tmp_path / "share"
    follow = Follower(note, 0)
    moves = Moves()
    follow.parts = moves  # type: ignore[assignment]
    for part in (SIXTEEN, (0, 1), (0, 1), (4, 5, 6), SIXTEEN):
        gpus.give(part, 0, note, yields=False)
        follow()
    assert moves.log == [(0, 1), (4, 5, 6), SIXTEEN]


def test_an_actor_reads_in_its_note_whether_to_leave_room_and_moves_nowhere_for_that(tmp_path):
    gpus, note = Gpus([H200], {}), tmp_path / "share"
    follow = Follower(note, 0)
    assert follow() is False
    said = []
    for yields in (True, True, False, True):
        gpus.give(SIXTEEN, 0, note, yields)
        said.append(follow())
        follow.where_it_pays()
    assert said == [True, True, False, True]
    assert follow.parts is None, "no part of the GPU was asked for"


def test_a_training_moves_between_micro_batches_where_its_part_is_much_larger_or_smaller(tmp_path):
    gpus, note = Gpus([H200], {}), tmp_path / "share"
    follow = Follower(note, 0)
    moves = Moves()
    follow.parts = moves  # type: ignore[assignment]
    parts = (
        SIXTEEN[:12],
        SIXTEEN[:10],
        SIXTEEN[:8],
        SIXTEEN[:6],
        SIXTEEN[:11],
        SIXTEEN[:13],
        SIXTEEN[2:15],
        SIXTEEN,
    )
    for part in parts:
        gpus.give(part, 0, note, yields=False)
        follow.where_it_pays()
    assert moves.log == [SIXTEEN[:10], SIXTEEN[:6], SIXTEEN[:11]]
    follow()
    assert moves.log[-1] == SIXTEEN


def test_on_a_gpu_an_actor_follows_its_note_and_elsewhere_only_counts_its_cores(tmp_path):
    settle, between = following(tmp_path / "share", "cuda:1", 1, 4)
    assert isinstance(settle, Follower)
    assert (settle.device, between) == (1, settle.where_it_pays)
    settle, between = following(tmp_path / "other", "cpu", 1, 4)
    assert isinstance(settle, Threads)
    assert (settle.most, between) == (4, settle.adapt)
    assert not (tmp_path / "other").exists()


def test_an_actor_has_as_many_threads_as_it_is_pinned_to_cores_and_never_more_than_it_may():
    cores, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    settle, alone = Threads(2), Threads(1)
    try:
        for held in (cores[:1], cores[:2], cores, cores[-1:]):
            pin(os.getpid(), held)
            assert settle() is False, "there is no room to leave to anybody"
            assert torch.get_num_threads() == min(2, len(held))
        pin(os.getpid(), cores)
        alone.adapt()
        assert torch.get_num_threads() == 1
    finally:
        pin(os.getpid(), cores)
        torch.set_num_threads(threads)


def test_a_note_that_was_written_before_the_actor_came_is_followed(tmp_path):
    write_note(tmp_path / "share", (3, 4))
    follow = Follower(tmp_path / "share", 0)
    moves = Moves()
    follow.parts = moves  # type: ignore[assignment]
    follow()
    assert moves.log == [(3, 4)]


# What is chosen where there is a GPU; what a look at it finds is played


@pytest.fixture
def an_h200(monkeypatch) -> None:
    monkeypatch.setattr(shares_module, "look", lambda environment: [H200])


def test_a_gpu_is_divided_under_a_daemon_that_ends_with_the_run(control, an_h200):
    with shares_here(1, "cuda") as shares:
        assert "in steps of 8 SMs, under MPS" in shares.describe()
        assert Path(shares.environment["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert shares.parts(0, [Sharer(0.25), Sharer(0.75)]) == [SIXTEEN[:4], SIXTEEN[4:]]
    assert list(control.iterdir()) == []


def test_a_daemon_says_when_a_clients_mistake_has_ended_them_all(control):
    mps = Mps()
    gpus = Gpus([H200], mps.environment, mps=mps)
    status = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"]) / "status"
    try:
        for said, broken in (("ACTIVE", False), ("FAULT", True), ("ACTIVE", False)):
            status.write_text(f"{said}\n")
            assert gpus.broken() == broken
    finally:
        mps.close()
    assert not Gpus([H200], {}, without_mps="it is not installed").broken()


def test_without_the_daemon_those_on_a_gpu_take_turns(an_h200, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with shares_here(1, "cuda") as shares:
        assert shares.describe().endswith(f"take turns (no MPS: {CONTROL} is not installed)")
        assert shares.environment == NO_GAPS, "nothing of MPS"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_a_user_told_the_allocator_stays(name, an_h200, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(name, "max_split_size_mb:512")
    with shares_here(1, "cuda") as shares:
        assert shares.environment == {}, "actors have the user's"


def test_a_gpu_that_fails_under_mps_is_used_without_it(control, monkeypatch):
    def look(environment: dict[str, str]) -> list[Gpu]:
        if environment:
            raise NoGpu("CUDA error: the MPS server is not ready")
        return [H200]

    monkeypatch.setattr(shares_module, "look", look)
    with shares_here(1, "cuda") as shares:
        assert shares.describe().endswith("take turns (no MPS: CUDA error: the MPS server is not ready)")
        assert list(control.iterdir()) == []  # the daemon is gone already


def test_more_workers_than_gpus_are_refused(control, an_h200):
    with pytest.raises(JigsawError, match="workers: 2 are asked for, and there are 1 GPUs"):
        shares_here(2, "cuda").__enter__()
