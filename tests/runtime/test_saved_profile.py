"""What a run learned of sharing a worker is in its profile, and the next run goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mixes import SUMS, Watching, write_mix
from scheduler.test_colocation import HALF, PAIR

from jigsawrl.config.pipelines import load_mix
from jigsawrl.graph.interference import CORES
from jigsawrl.graph.profile import load_profile, table_on
from jigsawrl.runtime.launch import run_mix
from jigsawrl.runtime.replay import replayed
from jigsawrl.scheduler import core, learning
from jigsawrl.simulator.from_config import scene_of


def shared(folder: Path, out: str, policy: str, profile: Path | None = None) -> Path:
    """Two pipelines on one worker of all cores; the profile that came of it."""
    large: dict[str, Any] = {
        **SUMS,
        "model": {"tiny": {**SUMS["model"]["tiny"], "warmup_steps": 1}},
        "rollout": {**SUMS["rollout"], "prompts_per_step": 32, "samples": 8},
    }
    file = write_mix(folder, policy, a=large, b=large)
    known = {"profile": str(profile)} if profile is not None else {}
    file.write_text(json.dumps({**json.loads(file.read_text()), "workers": 1, **known}))
    bases = folder / "alone" if profile is not None else None
    outcome = run_mix(load_mix(file), folder / out, False, Watching(), bases)
    assert {each.how for each in outcome.pipelines} == {"finished"}
    return folder / out / "profile.json"


@pytest.mark.slow
@pytest.mark.alone
def test_what_a_run_learned_of_sharing_is_saved_with_it_and_the_next_one_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread each they do not need the half of the cores that they leave to each other."""
    for module in (learning, core):  # the phases here are short
        monkeypatch.setattr(module, "BETWEEN_S", 0.0)
    alone = shared(tmp_path, "alone", "serial")
    assert load_profile(alone).interference is None
    first = shared(tmp_path, "first", "concurrent", alone)
    learned = load_profile(first).interference
    assert learned is not None
    assert learned.name == CORES.name
    assert learned.learned[PAIR].times > 1
    assert learned.speed(HALF, [HALF]) > 0.7
    scene = scene_of(load_mix(tmp_path / "mix.yaml", [f"profile={first}"]))
    assert table_on(scene.hardware, scene.profile) == learned
    again = shared(tmp_path, "again", "concurrent", first)
    more = load_profile(again).interference
    assert more is not None
    assert more.learned[PAIR].times > learned.learned[PAIR].times + 1
    for run in (first, again):
        decisions = list(replayed(run.parent))
        assert len(decisions) > 10
        assert all(decision.same for decision in decisions)
