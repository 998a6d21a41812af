"""What the documentation says of the scheduler core is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from graph.planning import WORKER, job

from jigsawrl.scheduler.invariants import INVARIANTS

PAGE = (Path(__file__).parent.parent / "docs/scheduler-core.md").read_text()


def test_the_smallest_policy_of_the_page_runs_two_jobs_to_their_end() -> None:
    """The simulator checks all invariants after every event."""
    given: dict[str, Any] = {"jobs": [job("a", steps=3), job("b", seed=1)], "hardware": WORKER}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, given)
    outcome = given["outcome"]
    assert outcome.finished.keys() == {"a", "b"}
    steps = [entry["pipeline"] for entry in outcome.log if entry["event"] == "step"]
    assert sorted(steps) == ["a", "a", "a", "b", "b"]


def test_the_page_lists_the_invariants_as_the_core_has_them() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert {int(number): what for number, what in rows} == INVARIANTS


def test_the_files_that_the_pages_name_are_there() -> None:
    root = Path(__file__).parent.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    for page in pages:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text()):
            there = (root / name, root / "jigsawrl" / name)
            assert any(path.is_file() for path in there), f"{page.name} names {name}"
