"""How a step's sequences are cut into minibatches, and that the update goes by it."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from small_runs import UNTRAINED, Noting, train

from jigsawrl.pipeline.minibatches import minibatches

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


def test_the_minibatches_of_an_epoch_hold_the_batch_and_not_the_same_samples_of_every_prompt(tmp_path):
    noting = Noting()
    algorithm = {"epochs": 2, "minibatches": 4}
    train(tmp_path / "run", steps=2, model=UNTRAINED, algorithm=algorithm, env=noting)
    assert [len(mini) for mini in noting.minibatches] == [8] * 16
    epochs = [noting.minibatches[start : start + 4] for start in range(0, 16, 4)]
    for first, second in (epochs[:2], epochs[2:]):
        assert sorted(chain(*first)) == sorted(chain(*second))
        assert first != second
    # 8 prompts of 4 samples: cut without a shuffle, every minibatch would have one sample of each prompt.
    assert all(len(set(mini)) < 8 for mini in noting.minibatches)
