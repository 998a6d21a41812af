"""The same runs from Python."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jigsawrl import limits, temporary
from jigsawrl.config import RunConfig, files
from jigsawrl.config.runfile import anchor_paths, checked, described
from jigsawrl.config.runfolder import check_run_folder
from jigsawrl.errors import JigsawError
from jigsawrl.processes import spin_briefly
from jigsawrl.surface import in_python
from jigsawrl.telemetry.heartbeat import beating
from jigsawrl.underway import refuse_inside_another, under_way

if TYPE_CHECKING:
    from jigsawrl.pipeline.loop import Result
    from jigsawrl.telemetry.progress import Progress

Section = Mapping[str, Any]
CHILD = "JIGSAWRL_SANDBOX"


def train(
    *,
    task: str | Path | Section,
    model: str | Path | Section = "tiny",
    reward: str | Callable[..., Any] | Section | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> Result:
    """Trains a model and returns where it is.

        import jigsawrl

        def reward(data_source, solution_str, ground_truth, extra_info=None):
            return float(solution_str.strip() == ground_truth)

        if __name__ == "__main__":
            model = "models/SmolLM2-135M-Instruct"
            result = jigsawrl.train(model=model, task="sums.jsonl", reward=reward, steps=50)
            print(result.model)

    `task` is a data file or a run file's `task` section; `reward` a function at the top level of a file, or
    "file.py:function"; `settings` are the other keys of a run file, sections as dicts. The file of a reward
    function is imported by other processes, hence the guard. Relative paths are relative to the current folder.
    """
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if importing or os.environ.get(CHILD, str(os.getpid())) != str(os.getpid()):
        raise JigsawError(
            "train() was called while another process imported its file, for the reward function in it;\n"
            'put the call under: if __name__ == "__main__":'
        )
    spin_briefly()
    data = copy.deepcopy(settings)
    data["model"] = _section("model", model)
    data["task"] = _section("task", task, kind="data")
    if reward is not None:
        data["task"]["reward"] = _section("reward", target_of(reward) if callable(reward) else reward)
    if steps is not None:
        data["steps"] = steps
    if isinstance(kind := data["task"].get("kind"), str):
        data.setdefault("name", kind)
    anchor_paths(data, Path.cwd())
    config = checked(data)

    from jigsawrl.telemetry.progress import Progress

    with in_python(), Progress() as progress:
        return launch(config, Path(out or default_folder(config)), resume, progress)


def launch(config: RunConfig, out: Path, resume: bool, progress: Progress) -> Result:
    """Runs a checked config in a folder; what is wrong with the folder or the data shows before torch loads."""
    refuse_inside_another(out)
    limits.watch_memory()
    with limits.explained(out), under_way(out):
        temporary.folder(out)  # while there may be room for one
        if not check_run_folder(config, out, resume) and resume:
            progress.message(f"{out}: nothing to resume, starting from the beginning")
        check_task(config)
        for line in files.remarks(config):
            progress.message(line)
        workers = "1 worker" if config.workers == 1 else f"{config.workers} workers"
        progress.opening(f"{config.name}: {described(config)} on {workers}, into {out}")
        progress.doing(config.name, 0, "set-up")
        with _marked_children(), nullcontext() if progress.on_terminal else beating(progress.beat):
            from jigsawrl.pipeline.loop import run

            return run(config, out, resume, progress)


@contextmanager
def _marked_children() -> Iterator[None]:
    """Processes started meanwhile know that they belong to a run, so that `train` cannot start itself in them."""
    before = os.environ.get(CHILD)
    os.environ[CHILD] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(CHILD)
        if before is not None:
            os.environ[CHILD] = before


def check_task(config: RunConfig) -> None:
    """A JigsawError where the task's data or its own settings are at fault."""
    from jigsawrl.pipeline.tasks import load_task

    size, wanted = len(load_task(config.task, config.seed)), config.rollout.prompts_per_step
    if size < wanted:
        raise JigsawError(
            f"rollout.prompts_per_step: {wanted} is more than the {size} prompts of the task; "
            f"set it to at most {size}"
        )


def default_folder(config: RunConfig) -> Path:
    return Path("runs", config.name)


def target_of(function: Callable[..., Any]) -> str:
    """`file.py:name` of a function that other processes can import."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None) or ""
    if not (name.isidentifier() and file.endswith(".py") and os.path.isfile(file)):
        raise JigsawError(
            f"reward: {name or function!r} cannot be imported by other processes;\n"
            "put it into a .py file as a function at the top level, and pass it or 'file.py:function'"
        )
    return f"{os.path.abspath(file)}:{name}"


def _section(argument: str, value: str | Path | Section, **defaults: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    if isinstance(value, str | os.PathLike):
        return {**defaults, "path": os.fspath(value)}
    function = ", a function" if argument == "reward" else ""
    raise JigsawError(
        f"{argument}: {value!r} is not allowed; it must be a path{function} or a dict with the keys of a run file"
    )
