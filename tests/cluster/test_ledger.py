"""What a cluster's folder remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.config.cluster import TermsConfig, load_cluster_file
from jigsawrl.config.runfile import validated
from jigsawrl.daemon import ledger as module
from jigsawrl.daemon.ledger import Ledger
from jigsawrl.errors import JigsawError

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


def test_the_same_job_submitted_again_is_the_same_and_another_of_its_name_is_refused(ledger: Ledger) -> None:
    job, other = (validated({"steps": steps, "task": {"kind": "arithmetic"}}) for steps in (3, 4))
    assert ledger.submit("a", job, TermsConfig())
    assert not ledger.submit("a", job, TermsConfig())
    for name, run, terms in (("a", other, TermsConfig()), ("a", job, TermsConfig(priority=1))):
        with pytest.raises(JigsawError, match="there is a job a already"):
            ledger.submit(name, run, terms)
    with pytest.raises(JigsawError, match="there is a job a already"):
        ledger.submit("A", job, TermsConfig())  # some file systems have one folder for both
    assert ledger.count() == 1
    assert [event["kind"] for event in ledger.events()] == ["submitted"]


def test_a_job_that_was_cancelled_can_be_cancelled_again_and_a_finished_one_cannot(ledger: Ledger) -> None:
    for name, state in (("a", "cancelled"), ("b", "finished")):
        ledger.submit(name, validated({"task": {"kind": "arithmetic"}}), TermsConfig())
        job = ledger.job(name)
        job.state = state
        ledger.save(job)
    ledger.ask_to_cancel("a")
    with pytest.raises(JigsawError, match="b has ended: finished"):
        ledger.ask_to_cancel("b")


def test_events_do_not_grow_for_ever(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 5)
    for number in range(12):
        ledger.note("measured", "a", None, str(number))
    assert [event["text"] for event in ledger.events()] == ["7", "8", "9", "10", "11"]
