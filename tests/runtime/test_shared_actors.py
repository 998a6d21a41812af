"""Pipelines with adapters on one frozen model share their actors, and learn what they learn alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mixes import (
    CALC,
    STEPS,
    SUMS,
    Results,
    Watching,
    assert_nothing_is_left,
    command_of,
    events,
    grandchildren,
    learned,
    named,
    run_here,
    write_mix,
)
from test_moved_and_paused import Gathers, Restless

from jigsawrl.config.runfile import checked
from jigsawrl.liveness import SETTING
from jigsawrl.pipeline.loop import run
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Policy

pytestmark = pytest.mark.slow

Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Three on one model: other tasks, ranks and matrices."""
    tiny = checked({"name": "tiny", **SUMS})
    model = {"path": str(prepare_base(tiny, tmp_path_factory.mktemp("model"), lambda _: None))}
    small = {"rank": 2, "targets": ["q_proj", "down_proj"]}
    return {
        "a": {**SUMS, "model": {**model, "lora": {"rank": 4}}, "trainer": {"lr": 1e-2}},
        "b": {**CALC, "model": {**model, "lora": small}, "trainer": {"lr": 1e-2}},
        "c": {**SUMS, "model": {**model, "lora": {"rank": 4}}, "seed": 5, "algorithm": {"kl_coef": 0.1}},
    }


def outcome(out: Path) -> tuple[list[dict[str, float]], bytes]:
    return learned(out), (out / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def by_themselves(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each as an ordinary run on two workers, without anything of the runtime."""
    found: Results = {}
    for name, settings in runs.items():
        out = tmp_path_factory.mktemp("alone") / name
        run(
            checked({"name": name, **settings, "workers": 2, "threads": 1, "device": "cpu"}),
            out,
            False,
            Watching(),
        )
        found[name] = outcome(out)
    return found


def test_all_in_one_batch_learn_what_each_learns_alone(
    runs: Runs, by_themselves: Results, tmp_path: Path
) -> None:
    seen: set[str] = set()
    out = tmp_path / "out"
    run_here(
        write_mix(tmp_path, "concurrent", **runs),
        out,
        lambda *_: seen.update(command_of(pid) for pid in grandchildren()),
    )
    assert {name: outcome(out / name) for name in runs} == by_themselves
    assert {name for name in seen if name.startswith("actor")} == {"actor0:base", "actor1:base"}
    assert_nothing_is_left(out)


@pytest.mark.parametrize("policy", [Gathers(), Restless()])
def test_whoever_is_moved_or_paused_the_others_decode_on_and_all_learn_the_same(
    policy: Policy, runs: Runs, by_themselves: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "concurrent", policy)
    out = tmp_path / "out"
    run_here(write_mix(tmp_path, "concurrent", **runs), out)
    assert {name: outcome(out / name) for name in runs} == by_themselves
    assert_nothing_is_left(out)


@pytest.mark.parametrize(
    ("victim", "signals"),
    [
        ("driver:a", [signal.SIGKILL]),
        ("actor1:base", [signal.SIGKILL]),
        pytest.param("actor1:base", [signal.SIGSTOP], marks=pytest.mark.long),
    ],
)
def test_after_a_death_everyone_learns_the_same(
    victim: str,
    signals: list[int],
    runs: Runs,
    by_themselves: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SETTING, "6")
    left = list(signals)

    def kill(pipeline: str, step: int) -> None:
        if (pipeline, step) == ("a", 2) and left:
            os.kill(named(victim), left.pop())

    out = tmp_path / "out"
    ended = run_here(write_mix(tmp_path, "jigsaw", prompt=True, **runs), out, kill)
    assert [(each.how, each.steps) for each in ended.pipelines] == [("finished", STEPS)] * 3
    assert {name: outcome(out / name) for name in runs} == by_themselves
    died = {event["pipeline"] for event in events(out, "died")}
    assert died == {"a"} if victim == "driver:a" else "a" in died
    if signals == [signal.SIGSTOP]:
        said = "base/actor/1 did not show that it was alive for 6 s, and was ended"
        assert {event["reason"] for event in events(out, "died")} == {said}
    assert_nothing_is_left(out)


def test_deaths_of_drivers_leave_nothing_in_the_actors(
    runs: Runs, by_themselves: Results, tmp_path: Path
) -> None:
    counts: list[tuple[int, int]] = []

    def kill(pipeline: str, step: int) -> None:
        if pipeline == "a":
            own = Path(f"/proc/{named('actor0:base')}")
            counts.append((len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))))
            if step < STEPS:
                os.kill(named("driver:a"), signal.SIGKILL)

    out = tmp_path / "out"
    two = {name: runs[name] for name in "ab"}
    two["b"] = {**two["b"], "steps": 40}  # keeps the actors
    run_here(write_mix(tmp_path, "concurrent", prompt=True, **two), out, kill)
    assert outcome(out / "a") == by_themselves["a"]
    assert len(events(out, "died")) == STEPS - 1
    assert len(counts) == STEPS
    first, last = counts[0], counts[-1]
    assert last[0] - first[0] < 5, counts  # files of a group of two
    assert last[1] - first[1] < 3, counts
