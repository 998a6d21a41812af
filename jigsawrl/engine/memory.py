"""How many blocks the cache gets: what a step can use, within what the machine has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from jigsawrl.errors import JigsawError
from jigsawrl.model.spec import ModelSpec

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

HOST_FRACTION, DEVICE_FRACTION = 0.25, 0.5


def cache_blocks(config: RunConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Blocks for the largest batch the settings allow, or for as much of it as the free memory holds."""
    rollout = config.rollout
    size = rollout.block_size
    longest = min(rollout.max_prompt_tokens + rollout.max_tokens, spec.max_positions)
    if rollout.kv_cache_tokens is not None:
        wanted = rollout.kv_cache_tokens // size
    else:
        sequences = min(rollout.max_num_seqs, rollout.prompts_per_step * rollout.samples)
        per_sequence = spec.max_positions if config.task.kind in MULTI_TURN else longest
        block_bytes = 2 * spec.layers * size * spec.kv_size * dtype.itemsize
        room = int(free_bytes(device) // block_bytes)
        wanted = min(sequences * -(-per_sequence // size), room)
    if wanted * size < longest:
        raise JigsawError(
            f"rollout: the cache holds {wanted * size} tokens, but one sequence may have {longest}\n"
            "(max_prompt_tokens + max_tokens); raise kv_cache_tokens, or lower one of those"
        )
    return wanted


def shared_cache_blocks(
    configs: Sequence[RunConfig], spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> int:
    """For all of these at once, or for as much as the free memory holds; each of them fits alone."""
    wanted = [cache_blocks(config, spec, dtype, device) for config in configs]
    size = configs[0].rollout.block_size
    room = int(free_bytes(device) // (2 * spec.layers * size * spec.kv_size * dtype.itemsize))
    return max(*wanted, min(sum(wanted), room)) if len(wanted) > 1 else wanted[0]


MULTI_TURN = ("calculator", "textarena", "environment")


def free_bytes(device: torch.device) -> float:
    """What the cache may take: a part of the memory that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * DEVICE_FRACTION
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_FRACTION
