"""Single-player games of the textarena package by name."""

import contextlib
import difflib
import io
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.tasks.base import ListedTask
from jigsawrl.pipeline.tasks.environment import episodes, specify


def load(config: Any) -> ListedTask:
    _try_out(config.name, config.params)
    params = {"name": config.name, "params": config.params}
    spec = specify(config, "jigsawrl.pipeline.environments.textarena:TextArena", params)
    return episodes(spec, config.size, data_source=f"textarena/{config.name}")


def _try_out(name: str, params: dict[str, Any]) -> None:
    """Starts one game, since a game's own code is all that knows whether it can be played here."""
    try:
        from textarena.envs.registration import ENV_REGISTRY

        from jigsawrl.pipeline.environments.textarena import TextArena
    except ImportError as error:
        raise JigsawError("task.kind: textarena needs a package: pip install 'jigsawrl[envs]'") from error

    if name not in ENV_REGISTRY:
        near = difflib.get_close_matches(name, ENV_REGISTRY, n=3, cutoff=0.5)
        hint = f"near it: {', '.join(near)}" if near else "one that it has is GuessTheNumber-v0"
        raise JigsawError(f"task.name: textarena has no game {name!r}; {hint}")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            TextArena(name, params).reset(seed=0)
    except Exception as error:  # whatever a game's code raises, the remedy is another name or other params
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, AssertionError | ValueError) and "player" in reason.lower():
            raise JigsawError(f"task.name: {name} is not a game for one player ({reason})") from error
        raise JigsawError(
            f"task: textarena's {name} does not start with params {params}: {type(error).__name__}: {reason}\n"
            "Some games need a download, an API key or a newer Python; GuessTheNumber-v0 needs none of them."
        ) from error
