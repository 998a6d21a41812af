"""The work that is done side by side to measure how a GPU is shared, here on a CPU and by itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jigsawrl.config.pipelines import load_mix
from jigsawrl.config.runfile import checked
from jigsawrl.graph.interference import H200
from jigsawrl.graph.measured import ALL
from jigsawrl.graph.profile import Workload, load_profile, write_profile
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.runtime import measure
from jigsawrl.runtime.measure import Bench, Worker, add_table, rate_of
from jigsawrl.runtime.shares import Cores, Gpu, Gpus, Shares

RUN = {
    "name": "a",
    "device": "cpu",
    "model": {"tiny": {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "warmup_steps": 0}},
    "task": {"kind": "arithmetic"},
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    config = checked(RUN)
    folder: Path = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CONTEXT", 12)
        patch.setattr(measure, "LONGEST", 24)
        return Worker(config, prepare_base(config, folder, lambda text: None), "cpu")


@pytest.mark.parametrize(
    ("kind", "size", "count"), [("tail", 0, 1), ("tail", 1, 4), ("bulk", 1, 64), ("bulk", 2, 256)]
)
def test_a_rollout_has_its_sequences_until_something_else_is_begun(worker, kind, size, count, monkeypatch):
    monkeypatch.setattr(measure, "LONGEST", 24)
    with worker.held_to(()):
        step = worker.begin(kind, size, in_company=False)
        step()
        assert len(worker.actor.engine.partials()) == count
        for _ in range(20):  # they end, and are begun anew
            step()
        assert worker.actor.engine.has_unfinished()
        worker.begin("compute", 1, in_company=False)
        assert not worker.actor.engine.has_unfinished()


def test_prompts_are_read_that_were_never_read_before(worker, monkeypatch):
    monkeypatch.setattr(measure, "CONTEXT", 16)
    monkeypatch.setattr(measure, "TRAINED", 64)
    asked: list[tuple[int, ...]] = []
    add = worker.actor.engine.add_request
    monkeypatch.setattr(
        worker.actor.engine,
        "add_request",
        lambda each: (asked.append(tuple(each.prompt_token_ids)), add(each)),
    )
    step = worker.begin("prefill", 1, in_company=False)
    for _ in range(70):
        step()
        assert not worker.actor.engine.has_unfinished()
    assert {len(prompt) for prompt in asked} == {16}
    assert len(set(asked)) == len(asked) == 70 * 4


def test_a_training_makes_gradients(worker, monkeypatch):
    monkeypatch.setattr(measure, "TRAINED", 64)
    step = worker.begin("compute", 1, in_company=True)
    step()
    assert worker.actor.trainer.optimizer.has_gradients()


def test_rollouts_leave_room_as_in_a_run_where_they_are_not_alone(worker):
    for in_company in (True, False):
        worker.begin("tail", 0, in_company)
        assert worker.actor.engine.yields == in_company


class Told:
    """A pipe to a process that is ready at once and does everything twice a second."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.answers = iter((None, 2.0))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def poll(self, seconds: float) -> bool:
        return True

    def recv(self) -> Any:
        return next(self.answers)


@pytest.mark.parametrize("crowd", [[("tail", ALL)], [("tail", ALL), ("bulk", ALL), ("compute", 8)]])
def test_those_of_a_crowd_are_told_that_they_are_not_alone(crowd):
    bench = object.__new__(Bench)
    bench.units, bench.pipes = tuple(range(16)), [Told() for _ in crowd]  # type: ignore[misc]
    assert bench._rates(crowd, 1) == [2.0] * len(crowd)
    company = [told.sent[0][3] for told in bench.pipes]  # type: ignore[attr-defined]
    assert company == [len(crowd) > 1] * len(crowd)


def test_a_rate_is_how_often_work_is_done_in_a_second(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
    assert rate_of(lambda: None) == pytest.approx(2 / 3)  # at least twice, however long that takes


# What becomes of it


@pytest.fixture
def profile(tmp_path) -> Path:
    """Of pipelines with a large model and a small one."""
    (tmp_path / "run.yaml").write_text("task: {kind: arithmetic}\nmodel: {tiny: {warmup_steps: 0}}\n")
    (tmp_path / "mix.yaml").write_text(
        "workers: 1\npipelines: {big: {run: run.yaml}, small: {run: run.yaml}}\n"
    )
    known = load_profile("h100-traces")
    two = {
        "big": sized(known.workload("gsm8k_qwen3-4b"), 4e9),
        "small": sized(known.workload("gsm8k_qwen3-0.6b"), 6e8),
    }
    write_profile(replace(known, workloads=two), tmp_path / "profile.json")
    return tmp_path / "profile.json"


def sized(workload: Workload, parameters: float) -> Workload:
    return replace(workload, model=replace(workload.model, parameters=parameters))


def on(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "shares_here", lambda workers, device: nullcontext(shares))


def test_a_table_is_measured_with_the_smallest_model_and_stands_in_the_profile(profile, monkeypatch):
    asked: list[tuple[str, int]] = []

    def table(config: Any, base: Path, shares: Gpus, most: int, say: Any) -> Any:
        asked.append((config.name, most))
        return replace(H200, source="measured here")

    on(Gpus([Gpu("NVIDIA H200", sms=132, memory=139 << 30, units=16)], {}), monkeypatch)
    monkeypatch.setattr(measure, "measured_table", table)
    add_table(load_mix(profile.parent / "mix.yaml"), profile.parent, profile, lambda text: None)
    found = load_profile(profile)
    assert asked == [("small", 4)], "as many as there may be, since more than that would fit"
    assert found.interference is not None
    assert found.interference.source == "measured here"
    assert set(found.workloads) == {"big", "small"}


def test_cores_need_no_measuring(profile, monkeypatch):
    on(Cores([(0, 1)], {}), monkeypatch)
    add_table(load_mix(profile.parent / "mix.yaml"), profile.parent, profile, lambda text: None)
    assert load_profile(profile).interference is None


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (Gpus([Gpu("NVIDIA H200", 132, 139 << 30, 16)], {}, without_mps="none here"), "(no MPS: none here)"),
        (Gpus([Gpu("NVIDIA T4", 40, 15 << 30, 5)], {}), "(no two models as large as small's fit on the GPU)"),
    ],
    ids=["they take turns", "two do not fit"],
)
def test_where_nothing_can_be_measured_it_is_said_why(shares, why, profile, monkeypatch):
    said: list[str] = []
    on(shares, monkeypatch)
    add_table(load_mix(profile.parent / "mix.yaml"), profile.parent, profile, said.append)
    assert load_profile(profile).interference is None
    assert [each.startswith("not measured:") and each.endswith(why) for each in said] == [True]
