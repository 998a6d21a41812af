"""Parts of a GPU: they are obeyed, work on them comes in its order, and nothing that it gives depends on them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from jigsawrl.runtime.shares import NO_GAPS, Follower, Gpus, divided, shares_here, write_note

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SIXTEEN = tuple(range(16))


def test_complementary_parts_are_all_of_a_gpu():
    from jigsawrl.runtime.green import Parts

    parts = Parts(0)
    whole = tuple(range(parts.units))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert sms_of(parts, whole) == sms
    for level in range(1, parts.units):
        first, second = divided(whole, [level / parts.units, 1 - level / parts.units])
        assert sms_of(parts, first) + sms_of(parts, second) == sms


def sms_of(parts: Any, units: Sequence[int]) -> int:
    return sum(resource.sm.smCount for unit in units for resource in parts.cut[unit])


def test_a_quarter_of_a_gpu_is_clearly_slower_than_all_of_it():
    from jigsawrl.runtime.green import CLEARLY, Parts, quarter_ratio

    assert quarter_ratio(Parts(0)) > CLEARLY


def test_work_on_a_part_comes_after_what_was_before_and_before_what_follows():
    from jigsawrl.runtime.green import Parts

    parts = Parts(0)
    factor = torch.randn(2048, 2048, device="cuda") / 2048**0.5
    expected = torch.linalg.matrix_power(factor, 64)
    for some in (((0,), (8, 9), (0,)), ((5, 6), (5,), (15,))):
        product = factor
        for part in some:
            product = product @ product
            with parts.on(part):
                product = product @ product
        torch.testing.assert_close(product, expected, rtol=1e-2, atol=1e-3)


def test_an_engine_on_a_part_generates_what_it_generates_on_the_whole_gpu(tmp_path):
    from small_models import LetterTokenizer, random_model

    from jigsawrl.engine.engine import Engine
    from jigsawrl.engine.types import Request, SampleKey, SamplingParams

    def generated(follow: Follower | None) -> list[tuple[list[int], list[float]]]:
        model = random_model().to("cuda")
        options = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64}
        engine = Engine(model, LetterTokenizer(), deterministic=True, **options)
        keys = [SampleKey(seed=7, pipeline="p", step=0, prompt=0, sample=sample) for sample in range(8)]
        engine.add_request(Request("r", list(range(1, 22)), SamplingParams(max_tokens=40), keys))
        found = []
        for step in range(1000):
            if not engine.has_unfinished():
                break
            if follow is not None:
                write_note(tmp_path / "share", ((), (0, 1), (2, 3, 4))[step // 4 % 3])
                follow()
            found += engine.step()
        return sorted((list(o.generated.token_ids), list(o.generated.logprobs)) for o in found)

    follow = Follower(tmp_path / "share", 0)
    moved = generated(follow)
    assert len(moved) == 8
    write_note(tmp_path / "share", ())
    follow()
    assert moved == generated(None)


def test_a_training_that_is_moved_between_micro_batches_has_the_same_gradients(tmp_path):
    from small_models import random_model

    from jigsawrl.trainer.batch import Batch
    from jigsawrl.trainer.logprobs import token_logprobs
    from jigsawrl.trainer.optimizer import OptimizerSettings
    from jigsawrl.trainer.trainer import Trainer, trained_tokens

    model = random_model().to("cuda")
    tokens = [torch.arange(30 + number) % 60 + 1 for number in range(24)]
    batch = Batch(tokens, [torch.arange(1, len(each)) for each in tokens], {})
    trainer = Trainer(model, OptimizerSettings(lr=1e-3), 100)
    follow, parts = Follower(tmp_path / "share", 0), cycle([(0, 1), SIXTEEN[2:], (), (4, 5, 6, 7)])

    def objective(micro: Batch, hidden: torch.Tensor):
        targets = trained_tokens(micro).to(hidden.device)
        logprobs, _ = token_logprobs(hidden, model.head, targets, 1.0, entropy_gradient=False)
        return logprobs.sum(), {}

    def move() -> None:
        write_note(tmp_path / "share", next(parts))
        follow.where_it_pays()

    def gradients(between: Callable[[], None]) -> list[torch.Tensor]:
        model.zero_grad()
        trainer.forward_backward(batch, objective, between)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    still = gradients(lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would say if it had to wait for a stream that was left
        moved = gradients(move)
    write_note(tmp_path / "share", ())
    follow()
    assert still
    torch.testing.assert_close(moved, still, rtol=1e-4, atol=1e-5)


def test_memory_that_is_read_on_another_part_is_given_back_when_it_has_been_read():
    """In a process of its own: a failed read would end this one, and memory is taken as an actor takes it."""
    reads = """if True:
        import torch
        from jigsawrl.runtime.green import Parts
        from jigsawrl.store.memory import return_to_gpu

        parts = Parts(0)
        parts.move_to((0, 1))
        taken = torch.ones(1 << 28, device="cuda")
        parts.move_to((2, 3))
        for _ in range(50):
            total = taken.sum()
        del taken
        return_to_gpu(0)
        print(int(total))
    """
    run = subprocess.run(
        [sys.executable, "-c", reads],
        env={**os.environ, **NO_GAPS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.strip() == str(1 << 28), run.stderr


def test_a_machine_with_a_gpu_holds_shares_on_it_and_leaves_no_daemon():
    with shares_here(1, "cuda") as shares:
        assert isinstance(shares, Gpus)
        folder = Path(shares.environment["CUDA_MPS_PIPE_DIRECTORY"]).parent
        assert folder.is_dir()
        assert len(shares.workers[0]) > 1
        assert "a training's share is a green context, in steps of" in shares.describe()
    assert not folder.exists()
