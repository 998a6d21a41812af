"""Where runs make their stores: in shared memory, or where the environment says; a refusal leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mixes import CALC, SUMS, Results, poll, result, run_here, start, stores_of, write_mix

from jigsawrl.errors import JigsawError
from jigsawrl.store import folders
from jigsawrl.store.folders import STORE_FOLDER

PATIENCE_S = 60.0


def test_a_run_without_a_place_for_its_store_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write_mix(tmp_path / "mix", a=SUMS), tmp_path / "runs" / "mix"
    monkeypatch.setenv(STORE_FOLDER, str(tmp_path / "absent"))
    for _ in range(2):
        with pytest.raises(JigsawError, match=rf"absent: No such file.*\nSet {STORE_FOLDER} in the env"):
            run_here(file, out)
        assert [path.name for path in tmp_path.iterdir()] == ["mix"]


def test_what_was_there_before_a_refusal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write_mix(tmp_path / "mix", a=SUMS), tmp_path / "out"
    out.mkdir()
    (out / ".notes").write_text("mine")
    monkeypatch.setenv(STORE_FOLDER, str(tmp_path / "absent"))
    with pytest.raises(JigsawError, match="absent"):
        run_here(file, out)
    assert [path.name for path in out.iterdir()] == [".notes"]


def test_the_environment_says_where_stores_are_made_and_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_FOLDER, str(tmp_path))
    made = folders.make(None, tmp_path / "spill", 1 << 20)
    assert made.parent == tmp_path
    assert made in [root for root, _ in folders.stores()]
    folders.remove(made)
    monkeypatch.setenv(STORE_FOLDER, "")
    assert folders.place_for_stores() == Path("/dev/shm")


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = "mount -t tmpfs -o ro none /dev/shm"
    return subprocess.run([*UNSHARED, "sh", "-c", tried], capture_output=True).returncode == 0


UNSHARED = ["unshare", "--mount", "--map-root-user"]
RUN = 'mount -t tmpfs -o ro none /dev/shm && exec "$0" -m jigsawrl run "$@"'


@pytest.mark.slow
def test_where_shared_memory_cannot_be_written_a_run_says_what_to_set_and_then_runs(
    alone: Results, tmp_path: Path
) -> None:
    if not can_unshare():
        pytest.skip("this user may not make mounts of its own (unshare)")
    file, out, disk = write_mix(tmp_path, a=SUMS, b=CALC), tmp_path / "out", tmp_path / "disk"
    disk.mkdir()
    command = [*UNSHARED, "sh", "-c", RUN, sys.executable, str(file), "--out", str(out)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2, refused.stderr
    assert "cannot be made in /dev/shm: Read-only file system" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not out.exists()

    environment = {**os.environ, STORE_FOLDER: str(disk)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert {name: result(out / name) for name in ("a", "b")} == alone
    assert list(disk.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_run_with_its_store_on_a_disk_goes_on_and_may_have_its_store_elsewhere(
    elsewhere: bool, alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out, disk = write_mix(tmp_path, a=SUMS, b=CALC), tmp_path / "out", tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv(STORE_FOLDER, str(disk))
    run = start(file, out)
    run.wait_for_step("b")
    run.signal(signal.SIGKILL)
    poll(lambda: not run.alive(), "processes are left")
    (left,) = disk.iterdir()
    if elsewhere:
        monkeypatch.setenv(STORE_FOLDER, "")
    code, _, said = start(file, out, "--resume").end()
    assert code == 0, said
    assert {name: result(out / name) for name in ("a", "b")} == alone
    assert stores_of(out) == []
    assert left.exists() == elsewhere
