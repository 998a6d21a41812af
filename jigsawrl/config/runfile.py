"""Run files: a YAML text and overrides in, a checked `RunConfig` out. Torch is never imported here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jigsawrl.config import files, text
from jigsawrl.config.messages import explain, joined, shown_key
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError, shown
from jigsawrl.regular import read_named

MOST_BYTES = 1 << 20
"""Of a run file: some hundred times the largest ones."""
BYTES_OF_A_VALUE = 10
"""A file may come to as many values as if each took this many bytes."""


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a file and `a.b=c` overrides describe, with all defaults filled in and everything checked.

    Relative paths in the file are relative to its folder, those in overrides to the current folder; all are
    absolute in the result.
    """
    data = overridden(Path(path), overrides, anchor_paths)
    if "pipelines" in data:
        raise JigsawError(f"{path}: holds several pipelines; this takes a run file with one")
    return checked(data)


def overridden(
    path: Path,
    overrides: Sequence[str],
    anchor: Callable[[dict[str, Any], Path], None],
    most_bytes: int = MOST_BYTES,
) -> dict[str, Any]:
    """The mapping in a run file with a name and `a.b=c` overrides, its paths made absolute by `anchor`."""
    data = {"name": _default_name(path), **read_run_file(path, most_bytes)}
    anchor(data, path.absolute().parent)
    for override in overrides:
        _apply(data, override)
    anchor(data, Path.cwd())
    return data


def checked(data: dict[str, Any]) -> RunConfig:
    """The config of a mapping whose paths are absolute, after all checks of values, files and packages."""
    config = validated(data)
    if found := files.problems(config):
        raise JigsawError(joined(found))
    return config


def validated(data: dict[str, Any]) -> RunConfig:
    """The config of a mapping, after all checks of values."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise JigsawError(joined(explain(error, RunConfig, data))) from None


def described(config: RunConfig) -> str:
    """A run in a few words: its model, its task, its steps."""
    model = "a tiny model" if config.model.path == "tiny" else Path(config.model.path).name
    what = "adapters on " if config.model.lora else ""
    steps = "1 step" if config.steps == 1 else f"{config.steps:,} steps"
    return f"{what}{model}, task {config.task.kind}, {steps}"


def read_run_file(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The mapping in a run file, not yet checked."""
    try:
        written = read_named(path, most_bytes).decode("utf-8-sig")
        content = text.parse(written, str(path), most_bytes // BYTES_OF_A_VALUE)
    except FileNotFoundError:
        raise JigsawError(f"{path}: there is no such run file") from None
    except IsADirectoryError:
        raise JigsawError(f"{path}: is a folder; give a run file, such as {path / 'run.yaml'}") from None
    except UnicodeDecodeError as error:
        raise JigsawError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not isinstance(content, dict):
        what = {type(None): "empty", list: "a list"}.get(type(content), shown(content))
        raise JigsawError(f"{path}: is {what}; a run file is a mapping, such as 'task: {{kind: arithmetic}}'")
    return content


def anchor_paths(data: dict[str, Any], folder: Path) -> None:
    """Makes the relative paths of a run absolute, in place: model, adapter, data, and files of user code."""
    model, task = data.get("model"), data.get("task")
    if isinstance(model, dict):
        if model.get("path") != "tiny":
            _anchor(model, folder)
        _anchor(model.get("lora"), folder)
    if isinstance(task, dict):
        if task.get("kind") != "environment" or _is_file_target(task.get("path")):
            _anchor(task, folder)
        reward = task.get("reward")
        if isinstance(reward, dict) and _is_file_target(reward.get("path")):
            _anchor(reward, folder)


def _anchor(section: Any, folder: Path) -> None:
    if isinstance(section, dict) and isinstance(section.get("path"), str) and section["path"]:
        section["path"] = absolute(section["path"], folder)


def absolute(path: str, folder: Path) -> str:
    """A path that is relative to a folder; what can be no path stays as it is, to be refused with its key."""
    return path if "\0" in path else os.path.abspath(folder / os.path.expanduser(path))


def _is_file_target(target: Any) -> bool:
    return isinstance(target, str) and target.rpartition(":")[0].endswith(".py")


def _default_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100] or "run"


def _apply(data: dict[str, Any], override: str) -> None:
    """Sets one `a.b=c`; sections on the way that are missing or null are made."""
    name, equals, value = override.partition("=")
    *parents, last = keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise JigsawError(
            f"{shown(override)} is no override; write section.key=value, such as rollout.samples=8"
        )
    section = data
    for depth, key in enumerate(parents, 1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise JigsawError(
                f"{shown_key(override)}: {shown_key('.'.join(keys[:depth]))} is {shown(section)}, not a section"
            )
    section[last] = text.parse(value, shown_key(override))
