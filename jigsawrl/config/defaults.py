"""How many tokens an answer may have where the run file does not say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.errors import JigsawError
from jigsawrl.model.spec import read_spec

if TYPE_CHECKING:
    from jigsawrl.config.settings import RunConfig

MAX_TOKENS = 512
"""What TRL and verl allow an answer where nothing is said."""
SHORT_MAX_TOKENS = 64
"""Enough for an answer of the bundled sums, calculator calls included, and for all that a tiny model says."""
SHORT_TASKS = ("arithmetic", "calculator")


def default_max_tokens(config: RunConfig) -> int:
    """Tokens of an answer: as many as usual, fewer where a sequence has no room for them beside a prompt.

    Never fewer than a short answer has: where not even that fits, it is for the user to choose.
    """
    if config.model.path == "tiny" or config.task.kind in SHORT_TASKS:
        return SHORT_MAX_TOKENS
    rollout = config.rollout
    longest = [MAX_TOKENS + rollout.max_prompt_tokens]
    if (positions := _positions(Path(config.model.path))) is not None:
        longest.append(positions)
    if rollout.kv_cache_tokens is not None:
        longest.append(rollout.kv_cache_tokens // rollout.block_size * rollout.block_size)
    return max(SHORT_MAX_TOKENS, min(longest) - rollout.max_prompt_tokens)


def _positions(folder: Path) -> int | None:
    """The longest sequence of the model in a folder; None where that cannot be read, which is reported elsewhere."""
    try:
        return read_spec(folder).max_positions
    except JigsawError:
        return None
