"""A limit on processes is named, with what raises it; a small run does with few files and a user without a name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mixes import SUMS, write_mix

pytestmark = pytest.mark.slow

NOBODY = 54321
"""A user without a name."""
AS_NOBODY = f"""
import ctypes, os, resource, sys
libc = ctypes.CDLL(None)
libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
reads = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: this interpreter may be root's
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(reads, reads, reads, 0, 0, 0)) == 0
assert all(libc.prctl(47, 2, each, 0, 0) == 0 for each in (1, 2))  # PR_CAP_AMBIENT_RAISE
for name, most in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, name), (most, most))
os.execv(sys.executable, [sys.executable, "-m", "jigsawrl", *sys.argv[2:]])
"""
RUN = {**SUMS, "model": {"tiny": {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "warmup_steps": 0}}}


@pytest.fixture
def folder() -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else, of whom no process is there yet")
    made = Path(
        tempfile.mkdtemp(prefix="tests-", dir="/tmp")
    )  # an earlier test may have taken another folder for it
    os.chown(made, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made)


def jigsaw(folder: Path, *arguments: str, **limits: int) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("HOME", "USER", "LOGNAME")}
    return subprocess.run(
        [sys.executable, "-c", f"import json\n{AS_NOBODY}", json.dumps(limits), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**kept, "TMPDIR": str(folder)},
        timeout=120,
    )


def test_a_mix_that_cannot_start_its_processes_names_the_limit(folder: Path) -> None:
    mix = write_mix(folder, "concurrent", a=RUN, b=RUN)
    done = jigsaw(folder, "run", str(mix), "--out", "out", RLIMIT_NPROC=5)
    assert done.returncode == 2, done.stderr
    what = "another process or thread cannot be started"
    assert (
        f"jigsaw: {what}: there may be 5, of this user, threads included; raise it with `ulimit -u`"
        in done.stderr
    )
    assert [each.name for each in folder.iterdir() if each.name.startswith(("jigsawrl", "pymp"))] == []


def test_a_user_without_a_name_or_a_home_and_with_few_files_can_train(folder: Path) -> None:
    mix = write_mix(folder, "concurrent", a=RUN, b=RUN)
    done = jigsaw(folder, "run", str(mix), "--out", "out", RLIMIT_NOFILE=80)
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "a" / "model" / "config.json").exists()


def test_too_few_files_are_named(folder: Path) -> None:
    mix = write_mix(folder, "concurrent", a=RUN, b=RUN)
    done = jigsaw(folder, "run", str(mix), "--out", "out", RLIMIT_NOFILE=12)
    assert done.returncode == 2, done.stderr
    assert "too many files are open: 12 may be at a time\nraise the limit with `ulimit -n`" in done.stderr
