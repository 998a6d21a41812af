"""What a pipeline learns from: bundled tasks, data files, and environments, all behind one small protocol."""

from typing import Any

from jigsawrl.pipeline.tasks import arithmetic, calculator, data, environment, reasoning_gym, textarena
from jigsawrl.pipeline.tasks.base import Task


def load_task(config: Any, seed: int) -> Task:
    """The task of a run file's `task` section. JigsawError where the data or the settings are at fault."""
    match config.kind:
        case "arithmetic":
            return arithmetic.load(config, seed)
        case "data":
            return data.load(config)
        case "reasoning_gym":
            return reasoning_gym.load(config, seed)
        case "calculator":
            return calculator.load(config, seed)
        case "textarena":
            return textarena.load(config)
        case "environment":
            return environment.load(config)
    raise ValueError(f"no task of kind {config.kind!r}")
