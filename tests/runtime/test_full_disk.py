"""A disk without room ends pipelines with a line, not with four deaths; with room they go on from what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mixes import SUMS, events, learned, write_mix

pytestmark = pytest.mark.slow

TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "warmup_steps": 0}
RUN = {**SUMS, "model": {"tiny": TINY}, "checkpoint": {"every": 1000}}
TWICE = """
mount -t tmpfs -o size=$1 tmpfs disk || exit 77
jigsaw() { "$PYTHON" -m jigsawrl run "$2" --out disk/out --json "${@:3}" >"$1.json" 2>"$1.log"; echo $?; }
jigsaw first "$2"; cp -r disk/out first
mount -o remount,size=64m disk
jigsaw second "$2" --resume; cp -r disk/out second
"""


@dataclass(frozen=True)
class Twice:
    """A run on a disk of some size, and once more with room for everything. Copies of its folder: first, second."""

    folder: Path
    codes: list[int]

    def said(self, which: str) -> str:
        return (self.folder / f"{which}.log").read_text()

    def ended(self, which: str) -> dict[str, str]:
        found = json.loads((self.folder / f"{which}.json").read_text())["pipelines"]
        return {name: each["ended"] for name, each in found.items()}


def run_twice(folder: Path, size: str, file: Path) -> Twice:
    if os.getuid() != 0:
        pytest.skip("only root may mount")
    (folder / "disk").mkdir()
    command = ["unshare", "--mount", "bash", "-c", TWICE, "bash", size, str(file)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=120,
    )
    if not done.stdout:
        pytest.skip("no mount namespace can be made here")
    return Twice(folder, [int(line) for line in done.stdout.split()])


@pytest.mark.parametrize(
    ("size", "at"), [pytest.param("100k", "the base model", marks=pytest.mark.long), ("400k", "the export")]
)
def test_a_mix_says_that_the_disk_is_full_and_goes_on_when_it_is_not(
    tmp_path: Path, size: str, at: str
) -> None:
    mix = write_mix(tmp_path, "concurrent", a=RUN, b=RUN)
    done = run_twice(tmp_path, size, mix)
    assert done.codes == [1, 0], at
    said = done.said("first")
    assert "Traceback" not in said
    assert "No space left on device" in said
    assert "failed" in done.ended("first").values()
    assert events(tmp_path / "first", "died") == []
    assert done.ended("second") == {"a": "finished", "b": "finished"}
    whole = learned(tmp_path / "second" / "a")
    assert [row["step"] for row in whole] == [1, 2, 3]
    for name in "ab":
        saved = list((tmp_path / "first" / name).glob("checkpoints/step-*"))
        assert not saved or f"{name}: resuming after step 3" in done.said("second")


@pytest.mark.long
def test_a_pipeline_alone_says_in_a_line_that_the_disk_is_full(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(RUN))
    done = run_twice(tmp_path, "60k", file)
    assert done.codes == [2, 0]
    lines = done.said("first").splitlines()
    (told,) = [line for line in lines if line.startswith("jigsaw: ")]
    assert told.startswith("jigsaw: the disk is full: disk/out cannot be written")
    assert lines[-1] == "make room; what was saved is kept, and --resume goes on from there"
    assert "Traceback" not in done.said("first")
