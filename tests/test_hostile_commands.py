"""Every command with arguments that make no sense: exit code 2, one to three lines, no traceback, nothing written."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from cli_helpers import files_in
from fuzzing.check import limited, message_problem

from jigsawrl.cli import main

PLACES = {
    "missing": "nothing.yaml",
    "folder": "folder",
    "empty": "empty.yaml",
    "binary": "binary.yaml",
    "bomb": "bomb.yaml",
    "pipe": "pipe.yaml",
    "device": "/dev/zero",
    "list": "list.yaml",
    "long": "x" * 300,
    "beneath": "whole.yaml/x",
    "loop": "loop",
    "break": "a\nb",
    "surrogate": "\udcff.yaml",
}
COMMANDS = (
    "run {} --dry-run",
    "run {} --out out",
    "run {} --resume",
    "simulate {}",
    "simulate {} {}",
    "simulate whole.yaml --profile {}",
    "simulate cluster.yaml {}",
    "compare {}",
    "compare {} --simulate",
    "compare whole.yaml --simulate --profile {}",
    "plan {} {}",
    "plan cluster.yaml {}",
    "fit {}",
    "profile {}",
    "report {}",
    "replay {}",
    "submit {} whole.yaml",
    "pause {} a",
    "resume {} a",
    "cancel {} a",
    "cluster start {} --out out",
    "cluster status {}",
    "fetch {}",
)
WRONG = (
    "nonsense",
    "run",
    "run whole.yaml --steps 3",
    "run whole.yaml steps=-1",
    "run whole.yaml steps",
    "run whole.yaml =",
    "run whole.yaml steps=!!int",
    "run whole.yaml name=../../x",
    "run whole.yaml --out whole.yaml",
    "run whole.yaml --out whole.yaml/x",
    "run whole.yaml --out LONG",
    "run whole.yaml --out folder",
    "simulate whole.yaml --workers -1",
    "simulate whole.yaml --workers 1e3",
    "simulate whole.yaml --seed -1",
    "simulate whole.yaml --seed 99999999999999999999",
    "simulate whole.yaml --policy nonsense",
    "simulate whole.yaml --hardware nonsense",
    "simulate whole.yaml --out whole.yaml",
    "simulate whole.yaml --out LONG",
    "simulate whole.yaml steps=999999999",
    "compare whole.yaml --simulate --policies serial,nonsense",
    "compare whole.yaml --seed 3",
    "plan cluster.yaml jobs.yaml quantile=2",
    "fit folder --out whole.yaml",
    "fit folder --hardware nonsense",
    "profile whole.yaml --steps 0",
    "profile whole.yaml --out whole.yaml",
    "profile whole.yaml --out LONG.json",
    "submit folder whole.yaml --steps x",
    "submit folder whole.yaml --deadline x",
    "cluster",
    "cluster nonsense",
    "cluster start cluster.yaml --out whole.yaml",
    "fetch nonsense",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with whole files, and with everything that is none."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "whole.yaml").write_text("task: {kind: arithmetic}\nsteps: 2\n")
    (folder / "cluster.yaml").write_text("pools: {all: {kind: h100, runs: both}}\n")
    (folder / "jobs.yaml").write_text("jobs: {a: {rollout: 100, training: 50}}\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "notes.txt").write_text("mine\n")
    (folder / "empty.yaml").write_bytes(b"")
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    letters = "abcdefghijklmnop"
    pairs = pairwise(letters)
    bomb = "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairs)
    (folder / "bomb.yaml").write_text(bomb)
    (folder / "list.yaml").write_text(json.dumps([1, 2]))
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop").symlink_to("loop")
    return folder


def refusal_of(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line says that is refused in bounded time, and writes nothing."""
    before = files_in(folder)
    with pytest.raises(SystemExit) as ended, limited():
        main(arguments)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, ""), (arguments, said)
    assert said.err.startswith("jigsaw: "), (arguments, said.err)
    assert message_problem(said.err.removesuffix("\n")) is None, (arguments, said.err)
    assert files_in(folder) == before
    return said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_what_is_not_what_it_takes(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for place in PLACES.values():
        refusal_of([place if word == "{}" else word for word in command.split()], folder, capsys)


def test_a_command_refuses_options_that_make_no_sense(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for line in WRONG:
        refusal_of(line.replace("LONG", "x" * 300).split(), folder, capsys)


def test_a_command_of_bytes_that_are_no_text_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert "\\udcff" in refusal_of(["run", "whole.yaml", "\udcff=1"], folder, capsys)
    assert "\\udcff" in refusal_of(["run", "whole.yaml", "name=\udcff"], folder, capsys)
    assert "\\x1b" in refusal_of(["run", "\x1b[31m.yaml"], folder, capsys)
