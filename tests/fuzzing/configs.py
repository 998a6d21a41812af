"""Fuzz targets: run files, mixes, cluster files, jobs files, and overrides."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fuzzing.check import Case, Target
from fuzzing.values import as_yaml, damaged
from jigsawrl.config import load_run_file

RUN: dict[str, Any] = {
    "name": "sums",
    "steps": 3,
    "task": {"kind": "arithmetic", "max_number": 20, "operations": ["+", "-"], "size": 64},
}


def run_file(rng: random.Random, folder: Path) -> Case:
    """A damaged run file, loaded and resolved as `jigsaw run --dry-run` does."""
    path = folder / "run.yaml"
    path.write_bytes(as_yaml(rng, damaged(rng, RUN)))
    return lambda: load_run_file(path).to_yaml()


TARGETS: list[Target] = [run_file]
