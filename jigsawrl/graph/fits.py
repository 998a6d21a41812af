"""Whether pipelines fit into the memory there is, with the arithmetic where they do not."""

from __future__ import annotations

from collections.abc import Sequence

from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.outlook import Outlook


def refuse_what_cannot_fit(outlooks: Sequence[Outlook], hardware: Hardware, workers: int) -> None:
    """A JigsawError if a phase alone, or all pipelines' resident state, exceeds the memory."""
    host = 0.0
    for outlook in outlooks:
        shape = outlook.shape
        if shape.tp > workers:
            raise JigsawError(f"{shape.name}: an engine spans {shape.tp} workers and there are {workers}")
        width = workers // shape.tp * shape.tp
        sizes = outlook.memory(width // shape.tp, shape.tp, width)
        for phase, needed in (("rollout", sizes.rollout), ("training", sizes.training)):
            if needed > hardware.device_bytes:
                raise too_much(outlook, phase, needed, f"{width} workers", hardware)
        host += sizes.host
    if host > hardware.host_bytes:
        raise JigsawError(
            f"{len(outlooks)} pipelines keep {gigabytes(host)} in host memory for each worker, and there are "
            f"{gigabytes(hardware.host_bytes)}; run fewer at a time, or use more workers"
        )


def too_much(outlook: Outlook, phase: str, needed: float, where: str, hardware: Hardware) -> JigsawError:
    """What a phase needs, what there is, and what would help."""
    help_ = "use more workers"
    if outlook.shape.whole:
        fewer = "rollout.kv_cache_tokens" if phase == "rollout" else "trainer.micro_batch_tokens"
        kept = phase == "training" and not outlook.shape.recomputed and hardware.name != CPU
        again = "set model.gradient_checkpointing, " if kept else ""
        help_ = f"{again}lower {fewer}, or train adapters (model.lora)"
        if outlook.shape.ranks_on_each > 1:
            help_ = f"use more workers, as {outlook.shape.ranks_on_each} ranks share one"
    return JigsawError(
        f"{outlook.shape.name}: {phase} needs {gigabytes(needed)} on each of {where}, and a "
        f"{hardware.name} has {gigabytes(hardware.device_bytes)}; {help_}"
    )


def gigabytes(size: float) -> str:
    """In words; small models need parts of one."""
    return f"{size / 1e9:,.0f} GB" if size >= 1e10 else f"{size / 1e9:.3g} GB"
