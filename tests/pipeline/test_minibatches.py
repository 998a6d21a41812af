"""How a step's sequences are cut into minibatches, and that the update goes by it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from small_runs import SMALL, config

from jigsawrl.config import RunConfig
from jigsawrl.pipeline.loop import run
from jigsawrl.pipeline.minibatches import minibatches
from jigsawrl.pipeline.surroundings import Alone
from jigsawrl.pipeline.workers import Handle, Workers
from jigsawrl.telemetry.progress import Progress

SIZES = st.integers(0, 200)
COUNTS = st.integers(1, 20)
KEYS = st.integers(0, 2**32 - 1)


@given(SIZES, COUNTS, KEYS, KEYS, KEYS)
def test_every_sequence_is_in_one_minibatch_and_sizes_differ_by_one_at_most(size, count, seed, step, epoch):
    parts = minibatches(size, count, seed, step, epoch)
    assert sorted(place for part in parts for place in part) == list(range(size))
    assert len(parts) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(SIZES, KEYS, KEYS, KEYS)
def test_one_minibatch_is_the_batch_as_it_is(size, seed, step, epoch):
    assert minibatches(size, 1, seed, step, epoch) == [list(range(size))]


def test_the_shuffle_is_the_same_on_every_machine_and_another_for_each_seed_step_and_epoch():
    assert minibatches(8, 2, 0, 0, 0) == minibatches(8, 2, 0, 0, 0) == [[0, 3, 4, 6], [1, 2, 5, 7]]
    shuffles = [
        minibatches(64, 4, seed, step, epoch) for seed in (0, 1) for step in (0, 1) for epoch in (0, 1)
    ]
    assert len({str(each) for each in shuffles}) == 8


class Noting(Alone):
    """Notes the prompt of every sequence of every minibatch."""

    def __init__(self) -> None:
        self.minibatches: list[list[str]] = []

    def workers(self, config: RunConfig, base: Path, device: str) -> Workers:
        workers = super().workers(config, base, device)
        return Workers([NotingHandle(handle, self) for handle in workers.handles], workers.engine)


class NotingHandle:
    def __init__(self, handle: Handle, noting: Noting) -> None:
        self.handle = handle
        self.noting = noting
        self.result = handle.result
        self.close = handle.close

    def start(self, method: str, *args: Any) -> None:
        if method == "forward_backward":
            (batch,) = args
            prompts = [str(t[: p[0]].tolist()) for t, p in zip(batch.tokens, batch.trained, strict=True)]
            self.noting.minibatches.append(prompts)
        self.handle.start(method, *args)


def test_the_minibatches_of_an_epoch_hold_the_batch_and_not_the_same_samples_of_every_prompt(tmp_path):
    noting = Noting()
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}
    settings = config(steps=2, model=model, algorithm={"epochs": 2, "minibatches": 4})
    with Progress(json=True) as progress:
        run(settings, tmp_path / "run", False, progress, noting)
    assert [len(mini) for mini in noting.minibatches] == [8] * 16
    epochs = [noting.minibatches[start : start + 4] for start in range(0, 16, 4)]
    for first, second in (epochs[:2], epochs[2:]):
        assert sorted(chain(*first)) == sorted(chain(*second))
        assert first != second
    # 8 prompts of 4 samples: cut without a shuffle, every minibatch would have one sample of each prompt.
    assert all(len(set(mini)) < 8 for mini in noting.minibatches)
