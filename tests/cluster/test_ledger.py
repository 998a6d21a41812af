"""What a cluster's folder remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.config.cluster import load_cluster_file
from jigsawrl.daemon import ledger as module
from jigsawrl.daemon.ledger import Ledger

LOCAL = Path(__file__).parents[2] / "examples" / "cluster" / "local.yaml"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.make(tmp_path / "cluster", load_cluster_file(LOCAL))


def test_the_last_word_on_each_job_is_why_it_is_where_it_is(ledger: Ledger) -> None:
    for kind, job, text in (
        ("submitted", "a", ""),
        ("new group", "a", "no other"),
        ("waits", "b", "no room"),
        ("moved", "a", "cheaper so"),
        ("measured", "a", "a step alone takes 1 s"),
        ("packed", "b", "beside a"),
    ):
        ledger.note(kind, job, None, text)
    assert ledger.reasons() == {"a": "cheaper so", "b": "beside a"}


def test_events_do_not_grow_for_ever(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 5)
    for number in range(12):
        ledger.note("measured", "a", None, str(number))
    assert [event["text"] for event in ledger.events()] == ["7", "8", "9", "10", "11"]
