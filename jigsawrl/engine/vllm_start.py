"""Starts vLLM's engine inside this process, without letting it change the process around it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from jigsawrl.engine.memory import cache_blocks
from jigsawrl.errors import JigsawError
from jigsawrl.model.cpu import LIMIT
from jigsawrl.model.transformer import Transformer

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

CPU_BLOCK = 32
"""vLLM's attention on CPUs takes blocks of a multiple of this many tokens."""
TEMPERATURES = (0.01, 2.0)
"""vLLM raises lower ones to the first, and refuses higher ones than the second."""


def start(model: Transformer, base: Path, config: RunConfig, head_apart: bool) -> tuple[Any, int]:
    """vLLM's engine without weights, and the longest sequence it takes."""
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise JigsawError(
            f"rollout.backend: vllm cannot be imported ({error});\n"
            'pip install "jigsawrl[vllm]", or set it to jigsaw'
        ) from None
    rollout, spec, device = config.rollout, model.spec, model.device
    on_cpu = device.type == "cpu"
    low, high = TEMPERATURES
    if not low <= rollout.temperature <= high:
        raise JigsawError(
            f"rollout.temperature: {rollout.temperature} does not go with vllm; set it from {low} to {high}"
        )
    if on_cpu:
        check_heads(spec.head_dim)
    # vLLM's own bfloat16 kernels would use the AMX that kills the process.
    dtype = torch.float32 if on_cpu and LIMIT in os.environ else model.dtype
    tokens = cache_blocks(config, spec, dtype, device) * rollout.block_size
    block = -(-rollout.block_size // CPU_BLOCK) * CPU_BLOCK if on_cpu else rollout.block_size
    blocks = -(-tokens // block)
    room = min(spec.max_positions, blocks * block)
    cuts = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    workers = dist.is_initialized() and dist.get_world_size() > 1
    if workers:
        rank = dist.get_rank()
        os.environ["RANK"] = str(rank)
        os.environ["LOCAL_RANK"] = str(rank if device.index is None else device.index)
    arguments = EngineArgs(
        model=str(base),
        skip_tokenizer_init=True,
        generation_config="vllm",
        hf_overrides={"tie_word_embeddings": False} if head_apart else {},
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=room,
        block_size=block,
        # vLLM keeps one block for itself.
        kv_cache_memory_bytes=(blocks + 1) * 2 * spec.layers * block * spec.kv_size * dtype.itemsize,
        max_num_seqs=rollout.max_num_seqs,
        # On a CPU a seeded request makes vLLM fall over when its prompt is cut into chunks.
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, room if on_cpu else 0),
        enable_prefix_caching=True,
        # What a step returns is all that was sampled: nothing is under way when a sample is aborted.
        async_scheduling=False,
        enforce_eager=on_cpu,
        enable_sleep_mode=not on_cpu,
        logprobs_mode="raw_logprobs" if cuts and rollout.temperature == 1 else "processed_logprobs",
        distributed_executor_backend="external_launcher" if workers else "uni",
        disable_log_stats=True,
    )
    try:
        return LLMEngine.from_engine_args(arguments), room
    except (ValueError, NotImplementedError) as error:
        reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        raise JigsawError(
            f"rollout.backend: vllm cannot run this model ({shorten(reason, 200)}); set it to jigsaw"
        ) from error


def check_heads(head_dim: int) -> None:
    """vLLM's attention on CPUs is compiled for some sizes of heads, and only says so when it is called."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise JigsawError(
            f"rollout.backend: vllm on a CPU takes heads of {', '.join(map(str, sizes))} dimensions,\n"
            f"and this model's have {head_dim}; set it to jigsaw"
        )


def eager() -> AbstractContextManager[Any]:
    """Keeps vLLM from compiling what it runs beside the model: on a CPU that takes half a minute and wins nothing."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def undisturbed() -> Iterator[None]:
    """Lets vLLM start in this process without it leaving its mark on the rest.

    It would log to stdout, report its use, set libraries to load into child processes, take
    `torch.set_num_threads` away and reduce the threads.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # from its first line on
    loader = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name, value in loader.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
