"""The ranks of a run are fixed when it begins; the workers that it goes on with may be fewer or more."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from graph.planning import WORKER, job
from hypothesis import given
from hypothesis import strategies as st
from mixes import (
    CALC,
    STEPS,
    SUMS,
    Results,
    Watching,
    assert_nothing_is_left,
    events,
    learned,
    result,
    run_here,
    start,
    write_mix,
)
from scheduler.hearing import hear, runs
from test_moved_and_paused import Restless
from typer.testing import CliRunner

from jigsawrl.api import launch
from jigsawrl.cli import app
from jigsawrl.config.pipelines import Homes, load_mix
from jigsawrl.config.runfile import checked, validated
from jigsawrl.config.started import as_started
from jigsawrl.errors import JigsawError
from jigsawrl.graph import memory
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.interference import CORES
from jigsawrl.graph.memory import Memory
from jigsawrl.graph.outlook import Outlook
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Start
from jigsawrl.runtime.launch import member_of, own_config
from jigsawrl.runtime.replay import replayed
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, LoadRequest, PhaseDone
from jigsawrl.scheduler.layout import layout_in_pools, layout_of

RARELY_SAVED = {"checkpoint": {"every": 1000}}


def on(file: Path, **changes: Any) -> Path:
    """The same run file with other settings."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def run_until_a_step(file: Path, out: Path, resume: bool = False) -> None:
    """All of it is stopped after the first step of one of its pipelines, and saved."""
    stopped: list[str] = []

    def stop(name: str, step: int) -> None:
        if not stopped:
            stopped.append(name)
            os.kill(os.getpid(), signal.SIGTERM)

    made = run_here(file, out, stop, resume)
    assert "interrupted" in {each.how for each in made.pipelines}


def workers_of(out: Path) -> set[int]:
    """On which something ran in the last session."""
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    last = max(n for n, each in enumerate(lines) if each["event"] in ("start", "resume") and "units" in each)
    return {each["worker"] for each in lines[last:] if each["event"] == "substage"}


def results_of(out: Path) -> Results:
    return {name: result(out / name) for name in "ab"}


def everyone_finished(made: Any) -> bool:
    return [(each.how, each.steps) for each in made.pipelines] == [("finished", STEPS)] * len(made.pipelines)


# Several pipelines


@pytest.mark.slow
def test_a_mix_stopped_on_two_workers_goes_on_with_one_and_another_policy(
    alone: Results, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "jigsaw", prompt=True, a={**SUMS, **RARELY_SAVED}, b={**CALC, **RARELY_SAVED})
    run_until_a_step(mix, out)
    assert yaml.safe_load((out / "config.yaml").read_text())["ranks"] == 2
    assert everyone_finished(run_here(on(mix, workers=1, policy="serial"), out, resume=True))
    assert results_of(out) == alone
    assert workers_of(out) == {0}
    assert all(each.same for each in replayed(out)), "every decision of both sessions can be made again"
    assert_nothing_is_left(out)


@pytest.mark.slow
def test_a_mix_killed_on_two_workers_goes_on_with_one(alone: Results, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = {**CALC, "task": {**CALC["task"], "latency": 1.0}}
    command = start(write_mix(tmp_path, "concurrent", prompt=True, a=SUMS, b=slow), out)
    command.wait_for_step("b", 1)
    command.signal(signal.SIGKILL)
    command.end()
    command.assert_nothing_is_left(store=False)
    mix = on(write_mix(tmp_path, "concurrent", prompt=True, a=SUMS, b=CALC), workers=1)
    assert everyone_finished(run_here(mix, out, resume=True))
    assert results_of(out) == alone


@pytest.mark.slow
@pytest.mark.long
def test_a_mix_begun_on_one_worker_goes_on_with_two_and_its_pipelines_use_one_each(tmp_path: Path) -> None:
    out = tmp_path / "out"
    mix = on(write_mix(tmp_path, "rollmux", prompt=True, a=SUMS, b=CALC), workers=1)
    run_until_a_step(mix, out)
    assert everyone_finished(run_here(on(mix, workers=2, policy="jigsaw"), out, resume=True))
    for name in "ab":
        with Watching() as progress:
            config = validated(json.loads((tmp_path / f"{name}.yaml").read_text()) | {"name": name})
            launch(config, tmp_path / name, False, progress)
        assert result(out / name) == result(tmp_path / name)
    assert all(each.same for each in replayed(out))


@pytest.mark.slow
@pytest.mark.parametrize("does", ["pause", "swap"])
def test_ranks_that_share_a_worker_stand_still_and_sleep_together(
    does: str, alone: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for another in a sum keeps nobody waiting, whenever both are stopped; and the states of both
    leave a worker that does not hold those of all pipelines."""
    out = tmp_path / "out"
    mix = on(write_mix(tmp_path, "concurrent", a=SUMS, b=CALC), workers=1, ranks=2)
    if does == "pause":
        monkeypatch.setitem(POLICIES, "concurrent", Restless())
    else:
        for name in ("ACTIVATIONS_PER_LAYER", "ACTIVATIONS_NOW"):
            monkeypatch.setattr(memory, name, 0)  # else that is much more than any state of so small models
        sizes = [memory_of(mix, name) for name in "ab"]
        needed = max(max(size.rollout, size.training) for size in sizes)
        on(mix, memory=(needed + 0.9 * min(size.awake for size in sizes)) / 1e9)
    assert everyone_finished(run_here(mix, out))
    assert results_of(out) == alone
    assert does in {event["action"] for event in events(out, "action")}
    assert events(out, "died") == []


def memory_of(file: Path, name: str) -> Memory:
    """What a pipeline needs on each worker."""
    mix = load_mix(file)
    config = own_config(mix, name, "cpu").model_copy(update={"ranks": mix.config.gang})
    worker = cpu_worker(1, mix.config.workers)
    return member_of(mix, name, config, file.parent, worker, None).outlook.memory(1, 1, 1)


@pytest.mark.slow
def test_a_mix_from_before_ranks_were_kept_has_as_many_as_it_had_workers(
    alone: Results, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "serial", prompt=True, a=SUMS)
    run_until_a_step(mix, out)
    for folder in (out, out / "a"):
        kept = yaml.safe_load((folder / "config.yaml").read_text())
        del kept["ranks"]
        (folder / "config.yaml").write_text(yaml.safe_dump(kept))
    run_here(on(mix, workers=1), out, resume=True)
    assert result(out / "a") == alone["a"]


@pytest.mark.long
@pytest.mark.parametrize("first", ["jigsaw", "rlix"])
def test_three_ranks_go_from_two_workers_to_one_and_to_pools(first: str, tmp_path: Path) -> None:
    """Pools have one worker to train on, where all three ranks take turns."""
    out = tmp_path / "out"
    runs = {"a": {**SUMS, **RARELY_SAVED}, "b": {**CALC, **RARELY_SAVED}}
    mix = on(write_mix(tmp_path, first, prompt=True, **runs), ranks=3)
    run_until_a_step(mix, out)
    run_until_a_step(on(mix, workers=1, policy="concurrent"), out, resume=True)
    pools = {"rollout": 1, "training": 1}
    run_here(on(mix, workers=2, policy="rollmux", pools=pools), out, resume=True)
    for name, run in runs.items():
        with Watching() as progress:
            launch(validated({"name": name, "workers": 3, **run}), tmp_path / name, False, progress)
        assert result(out / name) == result(tmp_path / name)
    assert all(each.same for each in replayed(out))


@pytest.mark.long
@pytest.mark.parametrize(("before", "then"), [(2, 1), (1, 2)])
def test_adapters_in_shared_actors_go_on_with_other_workers(before: int, then: int, tmp_path: Path) -> None:
    tiny = checked({"name": "tiny", **SUMS})
    path = str(prepare_base(tiny, tmp_path / "model", lambda _: None))
    runs = {
        name: {**run, "model": {"path": path, "lora": {"rank": 4}}, "trainer": {"lr": 1e-2}, **RARELY_SAVED}
        for name, run in (("a", SUMS), ("b", CALC))
    }
    out = tmp_path / "out"
    mix = on(write_mix(tmp_path, "concurrent", prompt=True, **runs), workers=before)
    run_until_a_step(mix, out)
    run_here(on(mix, workers=then), out, resume=True)
    for name, run in runs.items():
        with Watching() as progress:
            launch(validated({"name": name, "workers": before, **run}), tmp_path / name, False, progress)
        adapter = Path("adapter", "adapter_model.safetensors")
        assert learned(out / name) == learned(tmp_path / name)
        assert (out / name / adapter).read_bytes() == (tmp_path / name / adapter).read_bytes()


# One pipeline


@pytest.mark.slow
@pytest.mark.parametrize(("before", "then"), [(2, 1), (1, 2)])
def test_a_single_run_goes_on_with_other_workers(before: int, then: int, tmp_path: Path) -> None:
    def train(out: Path, workers: int, steps: int, resume: bool = False) -> list[str]:
        config = validated({"name": "a", **SUMS, "workers": workers, "steps": steps})
        with Watching() as progress:
            launch(config, tmp_path / out, resume, progress)
            return progress.said

    train(tmp_path / "whole", before, 2)
    train(tmp_path / "parts", before, 1)
    said = train(tmp_path / "parts", then, 2, resume=True)
    assert result(tmp_path / "parts") == result(tmp_path / "whole")
    (told,) = [line for line in said if line.startswith("ranks: ")]
    assert (
        told
        == {
            1: "ranks: 2, on 1 worker: ranks on one worker take turns",
            2: "ranks: 1, on 2 workers: 1 of them are not used",
        }[then]
    )
    assert yaml.safe_load((tmp_path / "parts" / "config.yaml").read_text())["ranks"] == before
    assert {each["worker"] for each in events(tmp_path / "parts", "substage") if each["step"] == 2} == {0}


# What is refused


def test_settings_that_change_results_are_refused_as_ever(tmp_path: Path) -> None:
    def resumed(**changes: Any) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps({**SUMS, "workers": 2, "ranks": 2, **changes}))
        found = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "out"), "--resume"])
        assert isinstance(found.exception, JigsawError)
        return str(found.exception)

    (tmp_path / "out").mkdir()
    kept = validated({"name": "run", "workers": 2, "ranks": 2, **SUMS})
    (tmp_path / "out" / "config.yaml").write_text(kept.to_yaml())
    assert "holds a run with other settings: trainer.lr was 0.001, is 0.01" in resumed(trainer={"lr": 1e-2})
    assert "holds a run with other settings: ranks was 2, is 3" in resumed(ranks=3)
    assert "ranks: 9 is more than rollout.prompts_per_step 8; set ranks to at most 8" in resumed(ranks=9)


def test_a_mix_keeps_its_ranks(tmp_path: Path) -> None:
    out, mix = tmp_path / "out", write_mix(tmp_path, a=SUMS)
    (out / "a").mkdir(parents=True)
    (out / "config.yaml").write_text(yaml.safe_dump(load_mix(mix).config.model_dump(mode="json")))
    (out / "a" / "config.yaml").write_text(validated({"name": "a", **SUMS, "ranks": 2}).to_yaml())
    with pytest.raises(JigsawError, match="other settings: ranks was 2, is 1"):
        run_here(on(mix, ranks=1), out, resume=True)
    on(mix, ranks=2)
    (tmp_path / "a.yaml").write_text(json.dumps({**SUMS, "ranks": 1}))
    with pytest.raises(JigsawError, match="a: holds a run with other settings: ranks was 2, is 1"):
        run_here(mix, out, resume=True)


def test_more_ranks_than_there_are_prompts_to_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match=r"ranks: 4000 is more than .*; set it to at most 8"):
        run_here(on(write_mix(tmp_path, a=SUMS), ranks=4000), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pipeline_whose_folder_is_moved_to_another_mix_keeps_its_ranks(tmp_path: Path) -> None:
    """As the jobs of a cluster are, from group to group."""
    asked = validated({"name": "a", **SUMS, "workers": 2})
    (tmp_path / "config.yaml").write_text(validated({"name": "a", **SUMS, "ranks": 1}).to_yaml())

    def ranks(resume: bool, **changes: Any) -> int | None:
        config = asked.model_copy(update=changes)
        return as_started(config, tmp_path, tmp_path / "events.jsonl", resume, print, ranks=2).ranks

    assert ranks(resume=True) == 1
    assert ranks(resume=False) == 2
    assert ranks(resume=False, ranks=3) == 3


# Where ranks live


@given(ranks=st.integers(1, 9), workers=st.integers(1, 9), first=st.integers(0, 8), data=st.data())
def test_each_rank_has_a_worker_and_each_worker_one_engine(
    ranks: int, workers: int, first: int, data: st.DataObject
) -> None:
    layout = layout_of(ranks, workers, first % workers)
    assert len(layout.lives) == ranks
    assert len(layout.rollout) == min(ranks, workers)
    assert layout.training == layout.rollout
    assert layout.ranks_on_each == -(-ranks // workers)
    engines = [actor for actor in layout.gang if layout.rolls_out(actor)]
    assert engines == list(range(min(ranks, workers))), "the first ranks, so that one is the first rank"
    assert sorted(layout.lives[actor] for actor in engines) == list(layout.rollout)
    place = tuple(sorted(data.draw(st.sets(st.sampled_from(layout.training), min_size=1))))
    seats = layout.seats(place)
    assert list(seats) == list(range(ranks))
    assert set(seats.values()) == set(place)


@given(rollout=st.integers(1, 4), training=st.integers(1, 4), ranks=st.integers(1, 9))
def test_ranks_train_in_their_pool_whatever_its_size(rollout: int, training: int, ranks: int) -> None:
    workers = rollout + training
    more = tuple(rollout + rank % training for rank in range(training, ranks))
    homes = Homes(tuple(range(rollout)), tuple(range(rollout, rollout + ranks)), None, more)
    layout = layout_in_pools(homes, workers)
    assert [layout.lives[actor] for actor in layout.gang] == [rollout + n % training for n in range(ranks)]
    assert len(layout.lives) == max(workers, rollout + ranks)
    assert [layout.engine_on(worker) for worker in layout.rollout] == list(range(rollout))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_pipelines_with_few_ranks_on_their_workers(policy: str) -> None:
    steps = 4
    core = SchedulerCore(POLICIES[policy], CORES, 3, WORKER.device_bytes)
    layouts = {"a": layout_of(1, 3, 2), "b": layout_of(2, 3, 1), "c": layout_of(3, 3)}
    for name, layout in layouts.items():
        made = job(name, seed=ord(name))
        core.join(name, Outlook(made.shape, made.costs, WORKER, made.forecast), layout)
        hear(core, name, LoadRequest())
        core.decide()
        hear(core, name, DriverBegan(steps, 0))
    seen = 0
    while core.state.unfinished():
        for action in core.decide():
            if isinstance(action, Start):
                workers = {worker for place in action.places for worker in place}
                assert workers <= set(layouts[action.pipeline].training)
        running = [name for name in layouts if runs(core, name)]
        assert running, "nobody is forgotten"
        core.state.advance(core.state.lanes.now + 1.0)
        phase, step = runs(core, running[0]) or ("rollout", 0)
        busy = (0.5,) * len(layouts[running[0]].lives)
        hear(core, running[0], PhaseDone(phase, step, busy, 1, (4,) * 8 if phase == "rollout" else ()))
        seen += 1
    assert seen == 2 * steps * len(layouts)


def test_a_worker_needs_memory_for_each_of_its_ranks(tmp_path: Path) -> None:
    file = write_mix(tmp_path, a=SUMS)
    sizes = {workers: memory_of(on(file, workers=workers, ranks=2), "a") for workers in (1, 2)}
    assert sizes[1].host == 2 * sizes[2].host
    cache = sizes[2].awake - sizes[2].host
    assert sizes[1].awake == 2 * sizes[2].host + cache, "one of them has the engine"
