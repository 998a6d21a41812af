from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mixes import CALC, SUMS, Results, result, run_here, write_mix

from jigsawrl.runtime.mps import CONTROL

PLAYED = """#!/bin/sh
orders="$CUDA_MPS_PIPE_DIRECTORY/orders"
if [ "$1" = -f ]; then
    mkfifo "$orders"
    while read -r order <"$orders"; do [ "$order" = quit ] && exit; done
fi
read -r order _
[ -p "$orders" ] || exit 1
case "$order" in
    quit) echo quit >"$orders" ;;
    get_server_status) cat "$CUDA_MPS_PIPE_DIRECTORY/status" ;;
    *) echo 4711 ;;
esac
"""
"""As much of the real one as is used here."""


@pytest.fixture
def control(tmp_path, monkeypatch) -> Iterator[Path]:
    """A control program that plays the real one; the folder for what it writes."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(PLAYED)
    program.chmod(0o755)
    written = tmp_path / "written"
    written.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(written))
    yield written
    assert list(written.iterdir()) == []


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of the two pipelines learns by itself, on the same workers."""
    found: Results = {}
    for name, run in (("a", SUMS), ("b", CALC)):
        folder = tmp_path_factory.mktemp(f"alone-{name}")
        run_here(write_mix(folder, "serial", **{name: run}), folder / "out")
        found[name] = result(folder / "out" / name)
    return found
