"""An actor that sleeps gives its memory away, and wakes as if it had never slept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, config, learned

from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.errors import JigsawError
from jigsawrl.model.tiny import write_tiny
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.pipeline import kept
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.execution_env import StandaloneEnv
from jigsawrl.pipeline.loop import run
from jigsawrl.pipeline.residency import Swapped
from jigsawrl.pipeline.warmup import prepare_base
from jigsawrl.pipeline.workers import Workers, start_workers
from jigsawrl.store.store import Store
from jigsawrl.telemetry.progress import Progress
from jigsawrl.trainer.batch import Batch

PAGE = 4096


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def make(budget_bytes: int = 1 << 30) -> Store:
        made.append(Store.create(tmp_path / f"spill-{len(made)}", budget_bytes))
        return made[-1]

    yield make
    for store in made:
        store.destroy()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gets some answers right, so that there is something to learn."""
    tiny = {**SMALL, "warmup_steps": 40, "warmup_noise": 0.3}
    settings = config(model={"path": "tiny", "tiny": tiny})
    return prepare_base(settings, tmp_path_factory.mktemp("base"), lambda text: None)


class Naps(StandaloneEnv):
    """Before every phase everybody sleeps and wakes. Only every second step is published."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.swaps: list[Swapped] = []

    def workers(self, config: Any, base: Path, device: str) -> Workers:
        self.gang = super().workers(config, base, device)
        return self.gang

    @contextmanager
    def phase(self, phase: PhaseKind, step: int) -> Iterator[None]:
        for verb in ("sleep", "wake_up"):
            self.swaps.append(self.gang.all(verb, self.store.root, "naps"))
        yield

    def remember(self, step: int, workers: Workers, state: dict[str, Any]) -> Callable[[], Any]:
        if step % 2 == 0:
            workers.first("publish", self.store.root, "naps", step, state)
        return super().remember(step, workers, state)


def trained(out: Path, env: StandaloneEnv, changes: dict[str, Any]) -> tuple[Any, bytes]:
    """The figures of a run's steps, and its final model."""
    with Progress(json=True) as progress:
        run(config(name="naps", deterministic=True, **changes), out, False, progress, env)
    return learned(out), (out / "model" / "model.safetensors").read_bytes()


def case(base: Path, kind: str) -> dict[str, Any]:
    model: dict[str, Any] = {"path": str(base)}
    match kind:
        case "adapters":
            model["lora"] = {"rank": 4}
            return {"model": model, "algorithm": {"kl_coef": 0.1}}
        case "critic and reference":
            return {"model": model, "algorithm": {"advantage": "gae", "kl_coef": 0.1}}
        case "bfloat16":
            model["dtype"] = "bfloat16"
    return {"model": model}


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("plain", 1 << 30),
        ("adapters", 1 << 30),
        ("critic and reference", 1 << 30),
        ("critic and reference", PAGE),
        ("bfloat16", 1 << 30),
    ],
)
def test_a_run_with_naps_learns_the_same_bit_for_bit(tmp_path, stores, base, kind, budget):
    store = stores(budget)
    naps = Naps(store)
    changes = case(base, kind)
    figures, model = trained(tmp_path / "naps", naps, changes)
    assert all(row["actor/grad_norm"] > 0 for row in figures)
    assert (figures, model) == trained(tmp_path / "awake", StandaloneEnv(), changes)
    usage = store.usage()
    assert (usage.spilled_bytes if budget == PAGE else usage.memory_bytes) > 0
    assert usage.memory_bytes <= budget
    assert all(swap.seconds > 0 for swap in naps.swaps)


def make_actor(base: Path, **changes: Any) -> Actor:
    return Actor(config(model={"path": str(base)}, **changes), base, "cpu")


def update(actor: Actor, prefix: str = "") -> None:
    getattr(actor, f"{prefix}forward_backward")(some_batch())
    getattr(actor, f"{prefix}optim_step")()


def some_batch() -> Batch:
    names = ("advantages", "weights", "engine_logprobs", "ref_logprobs", "old_values", "returns")
    values = dict.fromkeys(names, torch.linspace(-1, 1, 15))
    return Batch([torch.arange(1, 21)], [torch.arange(5, 20)], values)


def copied(actor: Actor) -> kept.State:
    return {part: {k: t.clone() for k, t in each.items()} for part, each in actor.save_state().items()}


def assert_equal(one: kept.State, other: kept.State) -> None:
    a, b = kept.flat(one), kept.flat(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_what_is_in_the_store_already_is_not_written_again(stores, base):
    store, actor = stores(), make_actor(base, algorithm={"kl_coef": 0.1})
    state = sum(tensor.nbytes for tensor in kept.flat(actor.save_state()).values())
    first = actor.sleep(store.root, "a").bytes
    assert first > 2 * state  # the weights, and the reference
    assert actor.wake_up(store.root, "a").bytes == pytest.approx(state, abs=PAGE)  # the reference is mapped
    assert actor.sleep(store.root, "a").bytes == 0
    actor.wake_up(store.root, "a")
    update(actor)
    assert actor.sleep(store.root, "a").bytes == pytest.approx(3 * state, rel=0.01)  # now with moments
    actor.wake_up(store.root, "a")
    update(actor)
    actor.publish(store.root, "a", 1, {"cursor": 8})
    before = copied(actor)
    assert actor.sleep(store.root, "a").bytes == 0
    assert store.names() == ["a/frozen", "a/optimizer", "a/weights"]
    actor.wake_up(store.root, "a")
    assert_equal(copied(actor), before)


def test_engine_and_trainer_still_share_one_model_and_its_tensors_stay_in_place(stores, base):
    store, actor = stores(), make_actor(base, algorithm={"advantage": "gae", "kl_coef": 0.1})
    update(actor)
    update(actor, "critic_")
    parameters = dict(actor.model.named_parameters())
    view = actor.model.embed_tokens.data[3:5]
    expected, before = view.clone(), copied(actor)
    moments = [id(t) for each in actor.trainer.optimizer.moments.values() for t in each.values()]
    actor.sleep(store.root, "a")
    assert actor.model.embed_tokens.untyped_storage().nbytes() == 0
    actor.wake_up(store.root, "a")
    assert all(parameter is parameters[name] for name, parameter in actor.model.named_parameters())
    assert actor.engine.model is actor.trainer.model
    assert torch.equal(view, expected)
    assert [id(t) for each in actor.trainer.optimizer.moments.values() for t in each.values()] == moments
    assert_equal(copied(actor), before)


def test_workers_that_share_a_store_share_the_pages_of_what_is_frozen(stores, base):
    store = stores()
    settings = config(model={"path": str(base)}, algorithm={"kl_coef": 0.1})
    gang = [Actor(settings, base, "cpu", worker) for worker in range(2)]
    for actor in gang:
        update(actor)
    before = copied(gang[1])
    assert [actor.sleep(store.root, "a").bytes > 0 for actor in gang] == [True, False]
    for actor in gang:
        actor.wake_up(store.root, "a")
        assert actor.reference is not None
        assert not actor.reference.embed_tokens.untyped_storage().resizable()  # a file's pages
    assert_equal(copied(gang[1]), before)
    assert [actor.sleep(store.root, "a").bytes for actor in gang] == [0, 0]


def test_sleep_comes_between_phases_and_nothing_works_before_waking(stores, base):
    store, actor = stores(), make_actor(base)
    with pytest.raises(RuntimeError, match="does not sleep"):
        actor.wake_up(store.root, "a")
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=2), [SampleKey(0, "a", 0, 0, 0)])
    actor.engine.add_request(request)
    with pytest.raises(RuntimeError, match="abort them first"):
        actor.sleep(store.root, "a")
    actor.abort()
    actor.trainer.optimizer.masters["embed_tokens"].grad = torch.zeros_like(actor.model.embed_tokens)
    with pytest.raises(RuntimeError, match="optim_step first"):
        actor.sleep(store.root, "a")
    actor.optim_step()
    actor.sleep(store.root, "a")
    for method, *arguments in (
        ("sleep", store.root, "a"),
        ("publish", store.root, "a", 1, {}),
        ("logprobs", Batch([], [])),
        ("optim_step",),
        ("sync_weights", 1),
        ("save_state",),
        ("export", store.root),
    ):
        with pytest.raises(RuntimeError, match=f"the actor sleeps: wake_up first, then {method}"):
            getattr(actor, method)(*arguments)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        actor.engine.add_request(request)
    actor.wake_up(store.root, "a")
    assert len(actor.engine.generate([request])) == 1


def test_an_actor_wakes_up_to_its_own_state_only(stores, base):
    store, actor = stores(), make_actor(base)
    actor.sleep(store.root, "a")
    with pytest.raises(JigsawError, match=r"b cannot wake up: its state is not in the store"):
        actor.wake_up(store.root, "b")
    other = make_actor(base)
    update(other)
    other.sleep(store.root, "a")
    with pytest.raises(JigsawError, match="after 1 updates, and it fell asleep after 0"):
        actor.wake_up(store.root, "a")
    other.wake_up(store.root, "a")


def test_a_step_counts_when_all_of_it_is_published(stores, base, monkeypatch):
    store, actor = stores(), make_actor(base)
    assert kept.recall(store, "a") is None
    update(actor)
    actor.publish(store.root, "a", 1, {"cursor": 8})
    first = copied(actor)
    update(actor)
    put = Store.put

    def killed(store: Store, name: str, *arguments: Any, **options: Any) -> None:
        if name == "a/optimizer":
            raise KeyboardInterrupt
        put(store, name, *arguments, **options)

    monkeypatch.setattr(Store, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        actor.publish(store.root, "a", 2, {"cursor": 16})
    monkeypatch.undo()
    assert store.versions("a/weights") == [1, 2]
    found = kept.recall(store, "a")
    assert found is not None
    assert (found.step, found.state) == (1, {"cursor": 8})
    assert_equal(found.tensors, first)
    actor.publish(store.root, "a", 2, {"cursor": 16})
    found = kept.recall(store, "a")
    assert found is not None
    assert (found.step, found.state) == (2, {"cursor": 16})
    assert_equal(found.tensors, copied(actor))
    assert store.versions("a/weights") == store.versions("a/optimizer") == [2]


@pytest.mark.slow
def test_sleepers_in_processes_free_their_memory_stay_together_and_lose_nothing_when_killed(tmp_path, stores):
    store, folder = stores(), tmp_path / "base"
    write_tiny(folder, layers=8, hidden=256, heads=4, kv_heads=2, seed=0)
    settings = config(model={"path": str(folder)}, workers=2, algorithm={"kl_coef": 0.1})
    with closing(start_workers(settings, folder, "cpu")) as gang:
        processes = [handle.process for handle in gang.handles]
        gang.forward_backward("forward_backward", some_batch())
        gang.all("optim_step")
        gang.first("publish", store.root, "a", 1, {"cursor": 8})
        before = gang.every("save_state")
        size = sum(tensor.nbytes for tensor in kept.flat(before[0]).values())
        awake = [private_bytes(process.pid) for process in processes]
        gang.all("sleep", store.root, "a")
        freed = [was - private_bytes(process.pid) for was, process in zip(awake, processes, strict=True)]
        assert min(freed) > 1.2 * size  # the reference is a third of it
        gang.all("wake_up", store.root, "a")
        for one, other in zip(gang.every("save_state"), before, strict=True):
            assert_equal(one, other)
        gang.forward_backward("forward_backward", some_batch())
        gang.all("optim_step")  # sums gradients over both
        one, other = gang.every("save_state")
        assert_equal(one, other)
        gang.all("sleep", store.root, "a")
        for process in processes:
            process.kill()
            process.join()
    found = kept.recall(store, "a")
    assert found is not None
    assert (found.step, found.state) == (1, {"cursor": 8})
    assert_equal(found.tensors, before[0])


def private_bytes(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def tear(store: Store, name: str) -> None:
    for path in store.root.glob(f"{name.replace('/', '+')}@*"):
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_step_of_which_a_part_is_torn_is_none(stores, base, part):
    store, actor = stores(), make_actor(base)
    update(actor)
    actor.publish(store.root, "a", 1, {"cursor": 8})
    tear(store, f"a/{part}")
    assert kept.recall(store, "a") is None


@pytest.mark.parametrize("what", ["asleep", "frozen"])
def test_an_actor_whose_state_is_torn_refuses_to_wake_up(stores, base, what):
    store, actor = stores(), make_actor(base, algorithm={"kl_coef": 0.1})
    update(actor)
    actor.sleep(store.root, "a")
    tear(store, f"a/{what}")
    with pytest.raises(JigsawError, match="a cannot wake up: its state is not in the store"):
        actor.wake_up(store.root, "a")


def test_the_state_of_another_model_is_not_loaded_and_changes_nothing(stores, base):
    actor = make_actor(base, algorithm={"advantage": "gae"})
    update(actor)
    update(actor, "critic_")
    good = copied(actor)
    assert actor.load_state(good) is True
    update(actor)
    before = copied(actor)
    name = next(key for key in good["policy"] if key.startswith("exp_avg."))
    wrong: list[kept.State] = [{}, {"policy": good["policy"]}]
    for key, tensor in (
        (name, torch.ones(3)),
        (name, good["policy"][name].double()),
        (f"weight.{name.removeprefix('exp_avg.')}", torch.ones(3)),
        ("counts", torch.ones(2)),
        ("counts", torch.tensor([1, 2, 3])),
        ("counts", torch.tensor([-1, 0])),
    ):
        wrong.append({**good, "policy": {**good["policy"], key: tensor}})
        wrong.append({**good, "policy": {k: v for k, v in good["policy"].items() if k != key}})
    for state in wrong:
        assert actor.load_state(state) is False
        assert_equal(copied(actor), before)
