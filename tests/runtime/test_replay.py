"""Every decision can be made again from the log alone."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
from mixes import CALC, SUMS, events, run_here, write_mix
from typer.testing import CliRunner

from jigsawrl.cli import app
from jigsawrl.errors import JigsawError
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime.replay import replayed


@pytest.mark.parametrize(("policy", "least"), [("jigsaw", 4), ("rollmux", 12)])
def test_a_log_replayed_through_its_policy_gives_the_same_actions(
    policy: str, least: int, tmp_path: Path
) -> None:
    """Under `jigsaw` most phases follow without being asked for."""
    out = tmp_path / "out"
    run_here(write_mix(tmp_path, policy, a=SUMS, b=CALC), out)
    decisions = list(replayed(out))
    assert [each for each in decisions if not each.same] == []
    assert sum(len(each.was) for each in decisions) == len(events(out, "action")) >= least
    assert (
        f"{len(decisions)} decisions, all as they were"
        in CliRunner().invoke(app, ["replay", str(out)]).stdout
    )

    other = "serial"
    log = (out / "events.jsonl").read_text().replace(f'"policy":"{policy}"', f'"policy":"{other}"')
    assert POLICIES[other].name in log
    (out / "events.jsonl").write_text(log)
    assert not all(each.same for each in replayed(out)), "another policy decides otherwise"
    shown = CliRunner().invoke(app, ["replay", str(out), "--json"])
    assert shown.exit_code == 1
    said = json.loads(shown.stdout)
    assert said["others"] > 0
    assert said["first"]["was"] != said["first"]["now"]

    hint = "replay it with that"
    assert hint not in CliRunner().invoke(app, ["replay", str(out)]).stdout
    ours, theirs = platform.python_version(), "3.11.7" if sys.version_info >= (3, 12) else "3.12.3"
    (out / "events.jsonl").write_text(log.replace(f'"python":"{ours}"', f'"python":"{theirs}"'))
    assert f"by Python {theirs}" in CliRunner().invoke(app, ["replay", str(out)]).stdout
    (out / "events.jsonl").write_text(log.replace(f'"python":"{ours}"', '"python":["x"]'))
    assert hint not in CliRunner().invoke(app, ["replay", str(out)], catch_exceptions=False).stdout


def test_what_has_no_decisions_says_so(tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match="not the folder of a run"):
        list(replayed(tmp_path))
    (tmp_path / "events.jsonl").write_text(json.dumps({"t": 1.0, "event": "start", "pipeline": "a"}) + "\n")
    with pytest.raises(JigsawError, match="nothing to replay"):
        list(replayed(tmp_path))


@pytest.mark.parametrize(
    "event",
    [
        {"event": "start", "policy": "jigsaw", "workers": 2, "pipelines": ["a"], "hardware": {"name": "x"}},
        {"event": "turn", "at": 1.0, "heard": [], "decides": True, "everyone": True},
        {"event": "turn"},
    ],
)
def test_a_nonsensical_log_is_refused_by_its_line(event: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"t": 1.0, **event}) + "\n")
    with pytest.raises(JigsawError, match="line 1 cannot be replayed"):
        list(replayed(tmp_path))
