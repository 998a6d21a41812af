"""Machines with little shared memory, and run folders that were moved or copied."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mixes import SUMS, learned, run_here, write_mix

pytestmark = pytest.mark.slow

TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "warmup_steps": 0}
RUN = {**SUMS, "model": {"tiny": TINY}}


@pytest.mark.parametrize("size", [pytest.param("64m", marks=pytest.mark.long), "8m"])
def test_little_shared_memory_is_enough(tmp_path: Path, size: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may mount")
    mix = write_mix(tmp_path, "concurrent", a=RUN, b=RUN)
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 77; exec "$@"'
    run = [sys.executable, "-m", "jigsawrl", "run", str(mix), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *run], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespace can be made here")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in learned(tmp_path / "out" / "a")] == [1, 2, 3]


def test_a_run_goes_on_where_its_folder_was_moved_or_copied_to(tmp_path: Path) -> None:
    run_here(write_mix(tmp_path, "serial", a={**RUN, "steps": 2}), tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copied")
    shutil.move(tmp_path / "out", tmp_path / "deeper" / "moved")
    more = write_mix(tmp_path, "serial", a={**RUN, "steps": 3})
    for out in (tmp_path / "copied", tmp_path / "deeper" / "moved"):
        run_here(more, out, resume=True)
        assert [row["step"] for row in learned(out / "a")] == [1, 2, 3]
    assert learned(tmp_path / "copied" / "a") == learned(tmp_path / "deeper" / "moved" / "a")
