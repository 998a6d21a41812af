"""Nothing that has been on a disk, in a store or in a socket with a name is ever unpickled."""

from __future__ import annotations

import ast
from pathlib import Path

import jigsawrl

BETWEEN_PARENT_AND_CHILD = {"pipeline/actor_process.py", "pipeline/calls.py", "runtime/channel.py"}
"""Pipes that nobody else can write to; the first of these says so."""
RUN_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def what_runs_code(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & RUN_CODE
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & RUN_CODE
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
            found.add(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.add("allow_pickle")
    return found


def test_only_pipes_between_a_process_and_its_children_carry_pickles() -> None:
    package = Path(jigsawrl.__file__).parent
    found = {str(file.relative_to(package)): what_runs_code(file) for file in package.rglob("*.py")}
    assert {name for name, what in found.items() if what} == BETWEEN_PARENT_AND_CHILD
