"""Pipelines in bfloat16 on CPUs, some of which kill a process that believes what they say they can do."""

from __future__ import annotations

import pytest
from mixes import SUMS, start, write_mix

from jigsawrl.model.cpu import LIMIT

pytestmark = pytest.mark.slow


def test_every_process_of_a_run_keeps_to_what_the_cpu_can_really_do(tmp_path, monkeypatch):
    monkeypatch.delenv(LIMIT, raising=False)  # as a user's shell has it
    run = {**SUMS, "steps": 1, "model": {**SUMS["model"], "dtype": "bfloat16"}}
    command = start(write_mix(tmp_path, "jigsaw", a=run), tmp_path / "out")
    code, pipelines = command.answer()
    assert (code, pipelines["a"]["ended"]) == (0, "finished")
    command.assert_nothing_is_left()
