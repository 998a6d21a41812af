"""A task whose prompts come from an environment: the user's own class, or one of the bundled ones."""

from typing import Any

from jigsawrl.pipeline.tasks.base import JSON, EnvironmentSpec, ListedTask, Prompt


def load(config: Any) -> ListedTask:
    """The user's own class, `file.py:Class` or `module:Class`."""
    return episodes(specify(config, config.path, config.params), config.size, data_source=config.path)


def episodes(spec: EnvironmentSpec, size: int, data_source: str) -> ListedTask:
    """`size` episodes that differ by nothing but the seed of their `reset`, which gives the prompt's text."""
    prompts = [Prompt(index, None, None, None, data_source, {}) for index in range(size)]
    return ListedTask(prompts, environment=spec)


def specify(config: Any, target: str, params: dict[str, JSON]) -> EnvironmentSpec:
    """The spec of an environment-like task, whose kinds differ by the class and its parameters only."""
    return EnvironmentSpec(
        target=target,
        params=params,
        timeout=config.env_timeout,
        on_error=config.on_error,
        processes=config.processes,
        max_turns=config.max_turns,
        system_prompt=getattr(config, "system_prompt", None),
    )
