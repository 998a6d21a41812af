"""Command lines, run one after the other in one process that cannot import torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Case:
    """A command line, the files around it, and what it says: exit code, stderr, stdout."""

    arguments: str
    code: int
    stderr: str
    stdout: str | None = ""
    files: tuple[tuple[str, str], ...] = ()


DRIVER = """
import contextlib, io, json, os, sys
from jigsawrl.cli import main

results = []
for arguments, folder in json.load(sys.stdin):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(arguments)
        except SystemExit as end:
            results.append([end.code or 0, out.getvalue(), err.getvalue()])
json.dump(results, sys.stdout)
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str
    folder: Path
    written: set[str]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def without_torch(factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing torch or transformers fails."""
    blocked = factory.mktemp("blocked")
    for name in ("torch", "transformers"):
        (blocked / f"{name}.py").write_text("raise ImportError('imported before everything was checked')\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "JIGSAWRL"))}
    return kept | {"PYTHONPATH": str(blocked), "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}


def outcomes_of(
    cases: Mapping[str, Case],
    files: tuple[tuple[str, str], ...],
    factory: pytest.TempPathFactory,
    environment: dict[str, str],
) -> dict[str, Outcome]:
    """Every case in a folder of its own with these files in it."""
    folders = [factory.mktemp("case") for _ in cases]
    for case, folder in zip(cases.values(), folders, strict=True):
        for name, content in (*files, *case.files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    before = [files_in(folder) for folder in folders]
    lines = [
        [case.arguments.split(), str(folder)] for case, folder in zip(cases.values(), folders, strict=True)
    ]
    done = python(environment, "-c", DRIVER, input=json.dumps(lines))
    assert done.stderr == ""
    results = zip(json.loads(done.stdout), folders, before, strict=True)
    found = [Outcome(*said, folder, files_in(folder) - had) for said, folder, had in results]
    return dict(zip(cases, found, strict=True))


def python(environment: dict[str, str], *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **options)
