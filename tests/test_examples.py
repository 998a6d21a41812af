"""Examples are run as they are, but for fewer steps."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_python_example_trains_from_its_folder_and_prints_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLES / "from_scratch", tmp_path / "examples" / "from_scratch")
    script = tmp_path / "examples" / "from_scratch" / "train.py"
    text = script.read_text()
    assert text.count("steps=100") == 1
    script.write_text(text.replace("steps=100", "steps=2"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "data: a tiny model, task data, 2 steps on 1 worker, into runs/data"
    assert last.startswith("reward 0.")
    assert last.endswith(": runs/data/model")
    assert (tmp_path / "runs" / "data" / "model" / "model.safetensors").is_file()
