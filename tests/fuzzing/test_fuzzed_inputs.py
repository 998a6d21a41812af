"""Some hundred damaged model folders, data files, observations and rewards: each works or is refused clearly."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fuzzing import models, samples
from fuzzing.check import Target, judge

CASES = {"model_config": 120, "model_folder": 40, "model_tokenizer": 80, "model_chat_template": 8}
"""The others have 100."""


@pytest.mark.parametrize("target", [*models.TARGETS, *samples.TARGETS], ids=lambda target: target.__name__)
def test_what_is_damaged_works_or_is_refused_in_a_clear_message(target: Target, tmp_path: Path) -> None:
    for number in range(CASES.get(target.__name__, 100)):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        verdict = judge(target, f"test-{number}", folder)
        assert verdict.ended != "failed", f"case test-{number} of {target.__name__}, {folder}: {verdict.why}"
