"""Actors of two pools: weights cross once, engines sample from them, and either side sleeps by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, config

from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.errors import JigsawError
from jigsawrl.model.tiny import write_tiny
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.generating import Generating
from jigsawrl.pipeline.pooled import RolloutActor, TrainingActor, crossed_of
from jigsawrl.store.memory import is_released
from jigsawrl.store.store import Store

NAME = "apart"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.create(tmp_path / "spill", 1 << 30)
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("base"), seed=0, **SMALL)


def settings(base: Path, lora: bool) -> Any:
    model: dict[str, Any] = {"path": str(base), **({"lora": {"rank": 4}} if lora else {})}
    return config(name=NAME, deterministic=True, model=model)


def changed(actor: Actor) -> Actor:
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.trainer.optimizer.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return actor


def drawn(actor: Generating) -> list[tuple[list[int], list[int]]]:
    """Tokens, and the versions of the weights that drew them."""
    keys = [SampleKey(0, NAME, 1, 0, sample) for sample in range(4)]
    actor.engine.add_request(Request("0", [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True), keys))
    ended = []
    while actor.engine.has_unfinished():
        ended += actor.engine.step()
    return [
        (each.generated.token_ids, each.generated.versions)
        for each in sorted(ended, key=lambda e: e.key.sample)
    ]


@pytest.mark.parametrize("lora", [False, True])
def test_every_engine_samples_from_the_one_copy_that_crossed(base: Path, store: Store, lora: bool) -> None:
    run = settings(base, lora)
    trainer = changed(TrainingActor(run, base, "cpu"))
    size = trainer.publish_weights(store.root, NAME, 7)
    assert store.names() == [crossed_of(NAME)]
    whole = changed(Actor(run, base, "cpu"))
    whole.sync_weights(7)
    engines = [RolloutActor(run, base, "cpu", worker) for worker in range(2)]
    for engine in engines:
        assert [engine.take_weights(store.root, NAME, 7) for _ in range(2)] == [size, 0]
        assert drawn(engine) == drawn(whole)


@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_that_slept_takes_the_newest_weights_and_goes_on(
    base: Path, store: Store, lora: bool
) -> None:
    run = settings(base, lora)
    trainer = TrainingActor(run, base, "cpu")
    trainer.publish_weights(store.root, NAME, 0)
    engine = RolloutActor(run, base, "cpu")
    engine.take_weights(store.root, NAME, 0)
    before = drawn(engine)
    engine.sleep(store.root, NAME)
    assert all(map(is_released, engine.model.parameters()))
    with pytest.raises(RuntimeError, match="wake_up first"):
        engine.take_weights(store.root, NAME, 0)
    changed(trainer).publish_weights(store.root, NAME, 1)
    engine.wake_up(store.root, NAME)
    engine.take_weights(store.root, NAME, 1)
    fresh = RolloutActor(run, base, "cpu")
    fresh.take_weights(store.root, NAME, 1)
    assert drawn(engine) == drawn(fresh) != before


def test_a_step_that_is_made_again_crosses_again(base: Path, store: Store) -> None:
    run = settings(base, lora=False)
    trainer, engine = TrainingActor(run, base, "cpu"), RolloutActor(run, base, "cpu")
    for version in (4, 5):
        trainer.publish_weights(store.root, NAME, version)
    trainer.publish_weights(store.root, NAME, 4)
    assert engine.take_weights(store.root, NAME, 4) > 0
    with pytest.raises(JigsawError, match="version 5 of its weights is not in the store"):
        engine.take_weights(store.root, NAME, 5)
