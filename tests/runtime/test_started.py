"""What a mix decides for its pipelines when it starts, and keeps when it goes on."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml
from mixes import SUMS, run_here, write_mix

from jigsawrl.config.pipelines import load_mix
from jigsawrl.config.runfile import validated

pytestmark = pytest.mark.slow


def test_a_mix_that_goes_on_has_the_dates_of_its_start_and_newcomers_have_today(tmp_path: Path) -> None:
    file = write_mix(tmp_path, old=SUMS | {"steps": 1}, new=SUMS | {"steps": 1})
    mix, out = load_mix(file), tmp_path / "out"
    (out / "old").mkdir(parents=True)
    (out / "config.yaml").write_text(yaml.safe_dump(mix.config.model_dump(mode="json")))
    before = SUMS | {"rollout": SUMS["rollout"] | {"date": "2024-07-26"}}
    (out / "old" / "config.yaml").write_text(validated(before).to_yaml())
    run_here(file, out, resume=True)
    kept = {name: yaml.safe_load((out / name / "config.yaml").read_text()) for name in ("old", "new")}
    assert kept["old"]["rollout"]["date"] == "2024-07-26"
    assert kept["new"]["rollout"]["date"] == datetime.date.today().isoformat()
