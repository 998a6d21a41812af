"""A chat template that writes today's date writes the day on which the run started, whenever the run goes on."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import config, learned, train

from jigsawrl.config.runfolder import check_run_folder
from jigsawrl.config.started import as_started
from jigsawrl.errors import JigsawError
from jigsawrl.model.tiny import write_tiny

TEMPLATE = """\
{{- 'Today is ' + strftime_now('%d %b %Y %H:%M') }}
{%- for message in messages %}{{- '[' + message.content + ']' }}{% endfor %}
"""
REWARD = "def score(completions): return [float(len(text)) for text in completions]\n"
THEN = datetime.date(2024, 7, 26)


@pytest.fixture(scope="module")
def dated_chat(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A task and a model whose template writes the date: sections of a run file."""
    folder = tmp_path_factory.mktemp("dated")
    model = write_tiny(folder / "model", layers=1, hidden=32, heads=2, kv_heads=1, seed=0)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}]} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    reward = {"path": f"{folder / 'rewards.py'}:score"}
    return {
        "model": {"path": str(model)},
        "task": {"kind": "data", "path": str(folder / "rows.jsonl"), "reward": reward},
    }


def on(day: str, **settings: Any) -> dict[str, Any]:
    return {"rollout": {"prompts_per_step": 4, "samples": 2, "date": day, **settings}}


def test_a_run_that_goes_on_has_the_date_of_its_start(dated_chat: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path / "whole", steps=2, **dated_chat, **on("2024-07-26"))
    train(tmp_path / "other", steps=2, **dated_chat, **on("2024-07-27"))
    train(tmp_path / "parts", steps=1, **dated_chat, **on("2024-07-26"))
    train(
        tmp_path / "parts", steps=2, resume=True, **dated_chat, rollout={"prompts_per_step": 4, "samples": 2}
    )
    assert learned(tmp_path / "parts") == learned(tmp_path / "whole")
    assert learned(tmp_path / "other") != learned(tmp_path / "whole")
    assert yaml.safe_load((tmp_path / "parts" / "config.yaml").read_text())["rollout"]["date"] == "2024-07-26"


def started(folder: Path, resume: bool, **changes: Any) -> tuple[datetime.date | None, int, list[str]]:
    """The date and the max_tokens of a run that starts in a folder, and what was said."""
    said: list[str] = []
    run = as_started(config(**changes), folder, folder / "events.jsonl", resume, said.append)
    return run.rollout.date, run.rollout.max_tokens, said


def keep(folder: Path, before: dict[str, Any]) -> None:
    """A run folder as it was left."""
    (folder / "config.yaml").write_text(yaml.safe_dump(before))


def test_a_run_that_starts_has_today_unless_its_run_file_has_a_date(tmp_path: Path) -> None:
    assert started(tmp_path, False)[0] == datetime.date.today()
    assert started(tmp_path, True)[0] == datetime.date.today()
    assert started(tmp_path, False, rollout={"date": "2024-07-26"})[0] == THEN


def test_a_folder_without_a_date_has_that_of_its_first_event_and_says_so(tmp_path: Path) -> None:
    before = config().to_dict()
    del before["rollout"]["date"]
    keep(tmp_path, before)
    day, _, said = started(tmp_path, True)
    assert day == datetime.date.today()
    assert said == [f"{tmp_path}: keeps no date for the chat template; from now on it is {day}, today"]
    noon = time.mktime((2024, 7, 26, 12, 0, 0, 0, 0, -1))
    (tmp_path / "events.jsonl").write_text(f'{{"t":{noon},"event":"start"}}\n{{"t":{noon + 1e6}}}\n')
    day, _, said = started(tmp_path, True)
    assert day == THEN
    assert "2024-07-26, the day of its first event" in said[0]
    other = {"rollout": {"date": "2020-01-01"}}
    assert started(tmp_path, True, **other)[0] == datetime.date(2020, 1, 1)
    assert check_run_folder(config(**other), tmp_path, resume=True)


def test_a_folder_is_refused_for_another_date_but_not_for_none(tmp_path: Path) -> None:
    keep(tmp_path, config(rollout={"date": "2024-07-26"}).to_dict())
    assert check_run_folder(config(), tmp_path, resume=True)
    with pytest.raises(JigsawError, match=r"rollout.date was '2024-07-26', is '2024-07-27'"):
        check_run_folder(config(rollout={"date": "2024-07-27"}), tmp_path, resume=True)


def test_a_folder_of_other_defaults_goes_on_with_its_own(tmp_path: Path) -> None:
    open_run = {"rollout": {"max_tokens": None}}
    keep(tmp_path, config(rollout={"max_tokens": 20, "date": "2024-07-26"}).to_dict())
    assert check_run_folder(config(**open_run), tmp_path, resume=True)
    assert started(tmp_path, True, **open_run) == (THEN, 20, [])
    assert started(tmp_path, False, **open_run)[1] == 64
    with pytest.raises(JigsawError, match=r"rollout.max_tokens was 20, is 30"):
        check_run_folder(config(rollout={"max_tokens": 30}), tmp_path, resume=True)
