"""Which code decodes on a GPU, and why: decided from numbers, so no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jigsawrl.engine.decoding import Decoded, told_of_decoding, why_not_kernels, why_not_with

H200 = Decoded((9, 0), torch.bfloat16, 128, (1536, 1536, 8960), deterministic=False)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"capability": (10, 0)}, None),
        ({"head_size": 64}, None),
        (
            {"capability": (8, 9)},
            "the GPU has compute capability 8.9, and the kernels need 9.0 (Hopper) or later",
        ),
        ({"dtype": torch.float32}, "the model is in float32, and the kernels need bfloat16"),
        ({"head_size": 80}, "the model's heads have size 80, and the kernels need 64 or 128"),
        ({"sizes": (576, 576, 1500)}, "the model has a size of 1500, and the kernels need multiples of 64"),
        ({"deterministic": True}, "deterministic: true needs sums that do not depend on the batch"),
    ],
)
def test_kernels_decode_what_they_know_and_torch_the_rest_for_a_reason(
    changes: dict[str, Any], why: str | None
) -> None:
    assert why_not_kernels(replace(H200, **changes)) == why


@pytest.mark.parametrize(
    ("rank", "dtype", "why"),
    [
        (64, torch.bfloat16, None),
        (65, torch.bfloat16, "adapters have rank 65, and the kernels take up to 64"),
        (8, torch.float32, "adapters are in float32, and the kernels need bfloat16"),
    ],
)
def test_adapters_that_kernels_cannot_take_are_a_reason_too(
    rank: int, dtype: torch.dtype, why: str | None
) -> None:
    matrix = SimpleNamespace(shape=(rank, 576), dtype=dtype, is_cuda=True)
    adapters: Any = {torch.zeros(1): SimpleNamespace(a={"q_proj": matrix})}
    assert why_not_with(adapters) == why


def test_the_user_is_told_which_code_decodes_and_why() -> None:
    assert told_of_decoding("NVIDIA H200", why_not_kernels(H200)) == (
        "decoding on NVIDIA H200 with jigsawrl's kernels"
    )
    assert told_of_decoding("NVIDIA A100", why_not_kernels(replace(H200, capability=(8, 0)))) == (
        "decoding on NVIDIA A100 with torch's operators, which is slower than with jigsawrl's kernels: "
        "the GPU has compute capability 8.0, and the kernels need 9.0 (Hopper) or later"
    )
