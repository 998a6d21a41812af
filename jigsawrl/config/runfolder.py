"""Whether a run may use a folder: never over another run, never over files of something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jigsawrl.config.pipelines import PipelinesConfig, checked_mix
from jigsawrl.config.runfile import read_run_file, validated
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.started import RESOLVED, continued, dated, ranked
from jigsawrl.errors import JigsawError, shown
from jigsawrl.foreign import has_surrogates
from jigsawrl.surface import option

FREE = ("steps", "workers", "checkpoint", "telemetry")
"""Settings that may change when a run goes on; any other would make it a different run."""

FREE_IN_MIX: Any = {
    "policy": True,
    "workers": True,
    "pools": True,
    "pipelines": {"__all__": {"steps", "rollout_workers"}},
}
"""Likewise, of several pipelines."""


def check_run_folder(config: RunConfig, out: Path, resume: bool) -> bool:
    """Whether `out` holds this run already. A JigsawError where it holds anything else, or cannot be written."""

    def changed(data: dict[str, Any]) -> list[str]:
        before = ranked(validated(data))
        if (
            before.rollout.date is None and config.rollout.date is not None
        ):  # a folder from before dates were kept
            before = dated(before, config.rollout.date)
        return differences(before, continued(config, before))

    return _check(out, resume, changed)


def check_mix_folder(config: PipelinesConfig, out: Path, resume: bool) -> bool:
    """As `check_run_folder`, for several pipelines; each has a folder of its own inside."""

    def changed(data: dict[str, Any]) -> list[str]:
        before = checked_mix(data)
        ends = before.model_copy(update={"ranks": before.gang}), mix_as_started(config, before)
        old, new = (each.model_dump(mode="json", exclude=FREE_IN_MIX) for each in ends)
        return list(_differences(old, new))

    return _check(out, resume, changed)


def mix_in(out: Path) -> PipelinesConfig | None:
    """The pipelines that a folder holds; None where it holds none."""
    resolved = out / RESOLVED
    return checked_mix(read_run_file(resolved)) if resolved.exists() else None


def mix_as_started(config: PipelinesConfig, before: PipelinesConfig | None) -> PipelinesConfig:
    """With the number of ranks that they had `before`, if they go on and the run file does not name one."""
    ranks = config.ranks or (before or config).gang
    return config.model_copy(update={"ranks": ranks})


def _check(out: Path, resume: bool, changed: Callable[[dict[str, Any]], list[str]]) -> bool:
    """`changed` says what differs from the settings of the run that is there.

    A run writes its resolved file before any other, so a folder without one holds no run.
    """
    if has_surrogates(str(out)):
        raise JigsawError(
            f"{out}: its name is not UTF-8 text, so no model can be saved there; choose another folder with "
            f"{option('out')}"
        )
    there = writable_part(out)
    resolved = out / RESOLVED
    if there != out or not any(out.glob("[!.]*")):
        return False
    if not resolved.exists():
        raise JigsawError(
            f"{out}: is not empty, and holds no run; choose another folder with {option('out')}"
        )
    if not resume:
        raise JigsawError(
            f"{out}: holds a run already; continue it with {option('resume')}, or choose another with {option('out')}"
        )
    try:
        found = changed(read_run_file(resolved))
    except JigsawError as error:
        raise JigsawError(f"{resolved}: cannot be resumed: {str(error).splitlines()[0]}") from None
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise JigsawError(
            f"{out}: holds a run with other settings: {'; '.join(found[:3])}{more}\n"
            f"resume it with the settings it had, or choose another folder with {option('out')}"
        )
    return True


def writable_part(out: Path) -> Path:
    """The part of a path that is there, a folder that can be written; a JigsawError if it is anything else."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise JigsawError(f"{there}: is a file; choose another folder with {option('out')}")
    try:  # for some systems' folders, and for root, nothing else tells
        TemporaryDirectory(prefix=".", dir=there).cleanup()
    except OSError as error:
        why = error.strerror or error
        raise JigsawError(
            f"{out}: cannot be written ({why}); choose another folder with {option('out')}"
        ) from None
    return there


@contextmanager
def gone_if_refused(out: Path) -> Iterator[Callable[[], None]]:
    """What a run has put into a folder that held none, if it is refused before it calls what this gives: the same
    folder can be named again when its settings are put right."""
    there = out.exists()
    before = set(out.iterdir()) if there else set()
    begun = out / RESOLVED in before

    def accepted() -> None:
        nonlocal begun
        begun = True

    try:
        yield accepted
    except JigsawError:
        if not begun and out.exists():
            for each in set(out.iterdir()) - before:
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            if not there:
                out.rmdir()
        raise


def differences(before: RunConfig, now: RunConfig) -> list[str]:
    """`key was a, is b` for each setting that differs and may not."""
    old, new = ({k: v for k, v in c.to_dict().items() if k not in FREE} for c in (before, now))
    return list(_differences(old, new))


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in {**old, **new}:
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key} was {shown(was)}, is {shown(now)}"
