"""Checkpoints: everything a run needs to go on as if it had never stopped.

    checkpoints/step-000010/   model.safetensors ...   tensors, as the caller named them
                               state.json              everything else, as JSON
                               manifest.json           format, step, fingerprint; size and digest of each file

A checkpoint is written aside under a dot name, synced to the disk and renamed into place, so one under its own
name is whole. A kill leaves at most dot folders, which the next save or load clears away. Only real folders that
this run wrote are ever deleted. No pickle: nothing in a checkpoint is code. One process owns the folder.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.surface import option

FORMAT = 2
PIECE, THREADS = 32 << 20, 16
"""Bytes of a file that are digested in one go, and how many goes at once: one core would take longer to digest a
model's state than it takes to write it."""
_STATE = "state.json"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(?P<step>\d{6,})")
_LEFTOVER = re.compile(r"\.(?P<kind>tmp|old)-(?P<name>step-\d{6,})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there, unchanged, and of this run. Tensors are on the CPU."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]
    path: Path


class _RefusedError(Exception):
    """Why a folder is not a checkpoint to go on from."""


class CheckpointStore:
    """The checkpoints of one run, of which the last `keep` are kept.

    The fingerprint is what must be equal for a checkpoint to be of use: a flat dict, JSON-serialisable.
    """

    def __init__(self, folder: Path, keep: int, fingerprint: dict[str, Any]) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must be kept")
        self._folder = folder
        self._keep = keep
        self._fingerprint = json.loads(json.dumps(fingerprint))

    def save(self, step: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]) -> Path:
        """Writes a checkpoint; when it returns, the checkpoint survives a power cut.

        Tensors that share memory are saved each on its own. When writing fails, earlier checkpoints are untouched.
        """
        target = self._folder / _folder_name(step)
        aside = self._folder / f".tmp-{target.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            aside.mkdir()
            self._write(aside, step, tensors, state)
            self._publish(aside, target)
        except (OSError, SafetensorError) as error:
            _delete(aside)
            reason = error.strerror if isinstance(error, OSError) else str(error).rpartition("I/O error: ")[2]
            raise JigsawError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {reason}\n"
                f"Earlier checkpoints are as they were; mend the cause and continue with {option('resume')}"
            ) from error
        self._delete_old(step)
        return target

    def newest(self) -> int | None:
        """The step of the newest checkpoint, good or not."""
        return max((step for step, _ in self._candidates()), default=None) if self._folder.is_dir() else None

    def load_latest(self, on_refused: Callable[[str], None]) -> Checkpoint | None:
        """The newest good checkpoint, or None where there is no checkpoint at all.

        Each one that is torn or foreign is reported and the one before it is tried; having none left is an error.
        """
        if not self._folder.is_dir():
            return None
        self._clear_leftovers()
        refusals = []
        for _, path in reversed(self._candidates()):
            try:
                return self._read(path)
            except _RefusedError as reason:
                refusals.append(f"checkpoint {path} is not used: {reason}")
                on_refused(refusals[-1])
        if refusals:
            raise JigsawError(
                f"nothing in {self._folder} can be resumed from. The {refusals[0]}\n"
                "Put a good checkpoint there, or start anew in another folder"
            )
        return None

    def _write(
        self, aside: Path, step: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]
    ) -> None:
        files = {}
        for name, content in tensors.items():
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name!r} cannot be a file's name")
            path = aside / f"{name}.safetensors"
            with durable.usual_mode(path):
                save_file(_apart(content), path)
            durable.sync(path)
            files[path.name] = _look_at(path)
        durable.write(aside / _STATE, json.dumps(state).encode())
        files[_STATE] = _look_at(aside / _STATE)
        manifest = asdict(_Manifest(FORMAT, step, self._fingerprint, files))
        durable.write(aside / _MANIFEST, json.dumps(manifest, indent=2).encode())
        durable.sync(aside)

    def _publish(self, aside: Path, target: Path) -> None:
        """Renames into place. What has the name already gives way: a kill in between brings our own checkpoint back,
        and what is not ours stays under another name."""
        old = target.with_name(f".old-{target.name}")
        if self._is_ours(target):
            target.rename(old)
        elif os.path.lexists(target):
            target.rename(_free_name(target))
        aside.rename(target)
        durable.sync(self._folder)
        _delete(old)

    def _clear_leftovers(self) -> None:
        for path in list(self._folder.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or not _is_folder(path):
                continue
            target = path.with_name(match["name"])
            if match["kind"] == "old" and not os.path.lexists(target):
                path.rename(target)
            else:
                _delete(path)

    def _candidates(self) -> list[tuple[int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        return sorted((int(match["step"]), path) for match, path in matches if match)

    def _delete_old(self, step: int) -> None:
        """Keeps the last ones up to this step; later ones, which could not be used, go once they are passed."""
        ours = [path for at, path in self._candidates() if at <= step and self._is_ours(path)]
        for path in ours[: -self._keep]:
            doomed = path.with_name(f".tmp-{path.name}")
            path.rename(doomed)
            _delete(doomed)

    def _is_ours(self, path: Path) -> bool:
        try:
            self._manifest(path)
        except _RefusedError:
            return False
        return True

    def _read(self, path: Path) -> Checkpoint:
        manifest = self._manifest(path)
        tensors = {}
        try:
            for name, recorded in manifest.files.items():
                _check(path / name, recorded)
                if name != _STATE:
                    tensors[name.removesuffix(".safetensors")] = load_file(path / name)
            state = json.loads((path / _STATE).read_bytes())
        except (OSError, SafetensorError) as error:
            raise _RefusedError(f"it cannot be read ({error})") from error
        return Checkpoint(manifest.step, tensors, state, path)

    def _manifest(self, path: Path) -> "_Manifest":
        """The manifest of a folder that is of this run; its files are not yet looked at."""
        if not _is_folder(path):
            raise _RefusedError("it is a link or a file, not a folder")
        manifest = _Manifest.read(path / _MANIFEST)
        if _folder_name(manifest.step) != path.name:
            raise _RefusedError(f"it is of step {manifest.step}, which is not what its name says")
        if manifest.fingerprint != self._fingerprint:
            raise _RefusedError(
                f"it is of another run, {_differences(manifest.fingerprint, self._fingerprint)}"
            )
        return manifest


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class _Manifest:
    """What a checkpoint says about itself."""

    format: int
    step: int
    fingerprint: dict[str, Any]
    files: dict[str, _File]

    @classmethod
    def read(cls, path: Path) -> "_Manifest":
        if not path.is_file():
            raise _RefusedError(f"it is torn, {path.name} is missing")
        try:
            fields = json.loads(path.read_bytes())
            version, step, fingerprint = (
                int(fields["format"]),
                int(fields["step"]),
                dict(fields["fingerprint"]),
            )
            if version != FORMAT:
                age = "a newer" if version > FORMAT else "an older"
                raise _RefusedError(f"it has format {version}, of {age} jigsawrl; this one reads {FORMAT}")
            files = {name: _File(**entry) for name, entry in fields["files"].items()}
            if _STATE not in files or not all(_FILE.fullmatch(name) for name in files):
                raise ValueError("files of another kind")
        except (
            OSError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise _RefusedError(f"it is torn, {path.name} is damaged") from error
        return cls(version, step, fingerprint, files)


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    """Deletes a leftover; what resists for now is tried again at the next save."""
    shutil.rmtree(path, ignore_errors=True)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.not-ours-{i}") for i in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, contiguous and without shared memory, which the file format does not know."""
    result, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _look_at(path: Path) -> _File:
    """Its digest is that of its pieces' digests."""
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(THREADS) as pool:
        size = os.fstat(file.fileno()).st_size
        read = partial(_piece_digest, file.fileno())
        pieces = b"".join(pool.map(read, range(0, size, PIECE)))
    return _File(size, hashlib.blake2b(pieces, digest_size=32).hexdigest())


def _piece_digest(descriptor: int, start: int) -> bytes:
    digest, place, end = hashlib.blake2b(digest_size=32), start, start + PIECE
    while place < end and (part := os.pread(descriptor, min(1 << 20, end - place), place)):
        digest.update(part)
        place += len(part)
    return digest.digest()


def _check(path: Path, recorded: _File) -> None:
    if not path.is_file():
        raise _RefusedError(f"it is torn, {path.name} is missing")
    size = path.stat().st_size
    if size != recorded.size:
        raise _RefusedError(f"it is torn, {path.name} has {size} bytes instead of {recorded.size}")
    if _look_at(path) != recorded:
        raise _RefusedError(f"it is torn, the content of {path.name} has changed (its digest differs)")


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    keys = [key for key in sorted({*saved, *current}) if saved.get(key) != current.get(key)]
    shown = [f"{key} was {saved.get(key)!r} and is {current.get(key)!r}" for key in keys[:3]]
    return ", ".join(shown) + (f", and {len(keys) - 3} more differ" if len(keys) > 3 else "")
