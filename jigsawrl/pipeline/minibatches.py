"""How the sequences of a step are cut into the minibatches of an epoch."""

from __future__ import annotations

from jigsawrl.pipeline.prompts import keyed


def minibatches(sequences: int, count: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions in the batch, shuffled into `count` minibatches whose sizes differ by one at most.

    A batch is sorted by prompt and sample. Without the shuffle every minibatch would hold the same samples of each
    prompt in every epoch. The shuffle depends on nothing but its arguments, and a minibatch keeps the order of the
    batch: with one minibatch, nothing changes.
    """
    order = sorted(range(sequences), key=lambda place: keyed("minibatches", seed, step, epoch, place))
    return [sorted(order[part::count]) for part in range(count)]
