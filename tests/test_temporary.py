"""The temporary folder of a process: its own, gone with it, and cleared away by the next where it was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jigsawrl import temporary
from jigsawrl.errors import JigsawError

MAKE = "import sys; from jigsawrl import temporary; print(temporary.folder(), flush=True); sys.stdin.read()"


def start(place: Path, code: str = MAKE) -> tuple[subprocess.Popen[str], Path]:
    """A process with a temporary folder there, and the folder. It ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: multiprocessing makes sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    yield folder
    shutil.rmtree(folder)


def test_a_process_has_one_folder_for_its_user_alone_that_is_gone_when_it_ends(place: Path) -> None:
    process, folder = start(place)
    assert folder.parent == place
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "left").mkdir()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert list(place.iterdir()) == []


def test_the_next_process_clears_what_a_killed_one_left_and_nothing_else(place: Path) -> None:
    others = ["pymp-abcdefgh", "jigsawrl-abcdefgh", f"jigsawrl-tmp-{os.getuid() + 1}-abcdefgh"]
    for name in others:
        (place / name).mkdir()
    lax = place / f"jigsawrl-tmp-{os.getuid()}-aaaaaaaa"  # not made by us: others may read it
    lax.mkdir()
    lax.chmod(0o755)
    target = place / "target"
    target.mkdir(mode=0o700)
    link = place / f"jigsawrl-tmp-{os.getuid()}-bbbbbbbb"
    link.symlink_to(target)
    (killed, left), (living, used) = start(place), start(place)
    (left / "pymp-12345678").mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert left.is_dir()
    third, _ = start(place)
    assert not left.exists()
    assert used.is_dir()
    for process in (living, third):
        process.communicate(timeout=30)
    assert {path.name for path in place.iterdir()} == {*others, lax.name, link.name, target.name}


def test_a_child_uses_its_parents_folder(place: Path) -> None:
    nested = (
        "import subprocess, sys; from jigsawrl import temporary; own = temporary.folder();"
        "code = 'from jigsawrl import temporary; print(temporary.folder())';"
        "said = subprocess.run([sys.executable, '-c', code], env=temporary.environment(), stdout=-1, text=True);"
        "print('same' if said.stdout.strip() == str(own) and own.is_dir() else said.stdout)"
    )
    process, said = start(place, nested)
    process.communicate(timeout=30)
    assert str(said) == "same"


def test_a_path_too_long_for_sockets_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("a" * 100)
    long.mkdir()
    short = tmp_path / "b"
    short.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(temporary, "USUAL", (str(short),))
    monkeypatch.setattr(temporary, "MOST_BYTES", len(str(short)) + 60)
    monkeypatch.setattr(temporary, "_made", {})
    assert temporary.folder().parent == short


def test_where_no_place_can_be_written_it_is_hidden_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in temporary.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(temporary, "USUAL", (str(tmp_path / "missing"),))
    monkeypatch.setattr(temporary, "_made", {})
    monkeypatch.setattr(temporary, "MOST_BYTES", 1000)
    made = temporary.folder(tmp_path / "runs" / "new")
    assert made.parent == tmp_path
    assert made.name.startswith(".")


def test_without_any_place_the_message_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(temporary, "USUAL", ())
    monkeypatch.setattr(temporary, "_made", {})
    with pytest.raises(JigsawError, match=r"no folder for temporary files.*\nset TMPDIR to one that can"):
        temporary.folder()
