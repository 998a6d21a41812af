"""What was sampled before a death is not sampled again."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixes import CALC, Command, result, start, stores_of, write_mix

from jigsawrl.engine.types import Generated, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.runtime.sample_journal import SampleJournal, packed, piece_of, rollout_of, unpacked
from jigsawrl.store.store import Store

PARAMS = SamplingParams(max_tokens=9)


def asked(prompt: list[int], samples: int = 2) -> Request:
    keys = [SampleKey(0, "a", 3, 7, sample) for sample in range(samples)]
    return Request("7", prompt, PARAMS, keys)


def output(request: Request, sample: int, tokens: list[int], ended: bool = True) -> SampleOutput:
    generated = Generated(tokens, [-0.5] * len(tokens), [3] * len(tokens))
    return SampleOutput("7", request.keys[sample], generated, "stop" if ended else "abort")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.create(tmp_path / "spill", 1 << 24)
    yield store
    store.destroy()


def test_a_sample_that_ended_is_answered_and_one_under_way_goes_on(store: Store) -> None:
    request = asked([1, 2], samples=3)
    before = SampleJournal(store, "a")
    before.note(request, output(request, 0, [5, 6]))
    before.keep([(request, output(request, 1, [8], ended=False))])

    known, rest = SampleJournal(store, "a").answered(request)

    assert known == [output(request, 0, [5, 6])]
    assert [(each.keys, each.partial and each.partial.token_ids) for each in rest] == [
        ([request.keys[1]], [8]),
        ([request.keys[2]], None),
    ]


def test_of_two_words_about_one_sample_the_longer_counts_and_its_end_most(store: Store) -> None:
    request = asked([1], samples=2)
    before = SampleJournal(store, "a")
    paused = [output(request, 0, [4, 4, 4], ended=False), output(request, 0, [4], ended=False)]
    before.keep([(request, each) for each in [*paused, output(request, 1, [9], ended=False)]])
    before.note(request, output(request, 1, [9, 9]))
    before.keep([])

    known, (goes_on,) = SampleJournal(store, "a").answered(request)

    assert known == [output(request, 1, [9, 9])]
    assert goes_on.partial is not None
    assert goes_on.partial.token_ids == [4, 4, 4]


def test_another_prompt_is_another_sample(store: Store) -> None:
    """An environment that answers differently the second time."""
    before = SampleJournal(store, "a")
    before.note(asked([1, 2]), output(asked([1, 2]), 0, [5]))
    before.keep([])
    assert SampleJournal(store, "a").answered(asked([1, 3])) == ([], [asked([1, 3])])


def test_what_was_said_of_an_episodes_turn_is_not_taken_for_its_next_one(store: Store) -> None:
    """An engine's last word may be about a turn that has ended since; all turns have the sample's key."""
    turns = [
        Request(f"7/0/{turn}", prompt, PARAMS, asked([]).keys[:1])
        for turn, prompt in enumerate(([1], [1, 5, 2]))
    ]
    under_way = SampleOutput("7/0/0", turns[0].keys[0], Generated([5], [-0.5], [3]), "abort")
    before = SampleJournal(store, "a")
    before.note(turns[0], SampleOutput("7/0/0", turns[0].keys[0], Generated([5], [-0.5], [3]), "stop"))
    before.keep([(turns[1], under_way)])
    after = SampleJournal(store, "a")
    assert [each.generated.token_ids for each in after.answered(turns[0])[0]] == [[5]]
    assert after.answered(turns[1]) == ([], [turns[1]])


def test_nothing_of_a_rollout_stays_in_the_store_when_its_training_has_ended(store: Store) -> None:
    request = asked([1])
    first = SampleJournal(store, "a")
    first.note(request, output(request, 0, [5]))
    first.keep([(request, output(request, 1, [5], ended=False))])
    second = SampleJournal(store, "a")
    second.answered(request)
    second.forget(rollout_of(request.keys[0]))
    assert store.names("a/") == []


def test_rollouts_in_flight_are_kept_and_forgotten_each_by_itself(store: Store) -> None:
    """A pipeline may have begun the next rollout while it trains on the last one."""
    request, later = asked([1]), asked([1])
    later.keys = [replace(key, step=4) for key in later.keys]
    before = SampleJournal(store, "a")
    for each in (request, later):
        before.note(each, output(each, 0, [5]))
        before.keep([(each, output(each, 1, [8], ended=False))])
    before.forget(rollout_of(request.keys[0]))
    after = SampleJournal(store, "a")
    assert after.answered(request) == ([], [request])
    known, (goes_on,) = after.answered(later)
    assert (known, goes_on.keys) == ([output(later, 0, [5])], later.keys[1:])


def test_entries_of_others_are_no_rollouts(store: Store) -> None:
    store.put("a/sampled/next", 0, *samples_entry())
    store.put("ab/sampled/4", 0, *samples_entry())
    assert SampleJournal(store, "a").rollouts == {}


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_planted_pickle_is_neither_run_nor_read(store: Store, tmp_path: Path) -> None:
    store.put_bytes("a/sampled/4", 0, pickle.dumps([Planted(tmp_path / "mark")]))
    store.put_bytes("a/paused/4", 0, pickle.dumps(Planted(tmp_path / "mark")))
    assert SampleJournal(store, "a").answered(asked([1])) == ([], [asked([1])])
    assert not (tmp_path / "mark").exists()


def test_samples_are_the_same_when_they_come_back(store: Store) -> None:
    """To the last bit, whatever a model says of its tokens."""
    request = asked([1, 2])
    ended = SampleOutput(
        "7", request.keys[0], Generated([5, 0, 2**40], [-0.1, -math.inf, -1e-320], [0, 3, 9]), "length"
    )
    before = SampleJournal(store, "a")
    before.note(request, ended)
    before.keep([])
    assert SampleJournal(store, "a").answered(request)[0] == [ended]


@pytest.mark.parametrize("kind", ["sampled", "paused"])
def test_what_is_torn_is_sampled_again(kind: str, store: Store) -> None:
    request = asked([1, 2])
    before = SampleJournal(store, "a")
    before.note(request, output(request, 0, [5, 6]))
    before.keep([(request, output(request, 1, [8], ended=False))])
    (entry,) = store.root.glob(f"a+{kind}+4@*")
    os.truncate(entry, entry.stat().st_size // 2)
    known, rest = SampleJournal(store, "a").answered(request)
    assert (len(known), len(rest)) == ((0, 2) if kind == "sampled" else (1, 1))


def samples_entry() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    request = asked([1, 2])
    return packed([piece_of(request, output(request, sample, [5, 6])) for sample in range(2)])


def nonsense() -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Entries that are whole, and not of samples; each is wrong in one thing."""
    tensors, meta = samples_entry()
    first, second = meta["samples"]
    rows: list[Any] = [None, {}, "x", [None, second], [[], second], [first[:-1], second], [first]]
    for place, wrong in [
        *((number, each) for number in (0, 2, 3, 4, 7) for each in (-1, 1.5, True, "1", None, 2**70, [])),
        *((1, each) for each in (1, None, [], {})),
        *((5, each) for each in (1, "", "0" * 31, "z" * 32, None)),
        *((6, each) for each in ("done", 3, None, [], "")),
        (7, 3),
    ]:
        rows.append([[*first[:place], wrong, *first[place + 1 :]], second])
    found: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (tensors, {"samples": each}) for each in rows
    ]
    found += [
        (tensors, {**meta, "more": 1}),
        (tensors, {}),
        ({**tensors, "more": torch.ones(4)}, meta),
        ({}, meta),
    ]
    for name in tensors:
        whole = tensors[name]
        others = [whole.to(torch.int32), whole.to(torch.float16), whole[:-1], whole.reshape(2, 2), whole[0]]
        others += [-whole - 1] if name != "logprobs" else []
        found += [({**tensors, name: each}, meta) for each in others]
        found.append(({each: tensor for each, tensor in tensors.items() if each != name}, meta))
    return found


def test_whole_entries_of_other_things_are_no_samples(store: Store) -> None:
    assert len(unpacked(*samples_entry())) == 2
    for tensors, meta in nonsense():
        assert unpacked(tensors, meta) == [], meta
        store.put("a/sampled/4", 0, tensors, meta)
        SampleJournal(store, "a")


def test_what_no_engine_can_have_sampled_is_sampled_again(store: Store) -> None:
    """More tokens than may be, none at all, or one that the model does not have."""
    request = asked([1, 2], samples=4)
    before = SampleJournal(store, "a")
    for sample, tokens in enumerate([[5] * (PARAMS.max_tokens + 1), [], [5, 64], [5, 63]]):
        before.note(request, output(request, sample, tokens))
    before.keep([])
    after = SampleJournal(store, "a")
    after.vocabulary = 64
    known, (rest,) = after.answered(request)
    assert known == [output(request, 3, [5, 63])]
    assert rest.keys == request.keys[:3]


SLOW: dict[str, Any] = {
    **CALC,
    "steps": 1,
    "task": {**CALC["task"], "latency": 0.5, "latency_jitter": 0.5},
}
"""Its rollout takes long enough for something to be kept of it before it ends."""


def decoded(out: Path) -> int:
    """Tokens that went through engines one by one."""
    lines = (json.loads(line) for line in (out / "events.jsonl").read_text().splitlines())
    return sum(
        line["tokens"] for line in lines if line.get("substage") in ("decode", "tail") and "tokens" in line
    )


def kept_something(run: Command) -> bool:
    return remembers(run, "b/sampled/")


def remembers(run: Command, name: str) -> bool:
    return any(Store.attach(root).names(name) for root in stores_of(run.out))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nobody is killed."""
    folder = tmp_path_factory.mktemp("quiet")
    run = start(write_mix(folder, "concurrent", b=SLOW), folder / "out")
    run.end()
    return run.out


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver:b", "actor0:b"])
def test_a_rollout_that_is_killed_goes_on_with_the_samples_that_it_had(
    victim: str, quiet: Path, tmp_path: Path
) -> None:
    run = start(write_mix(tmp_path, "concurrent", b=SLOW), tmp_path / "out")
    run.wait_for(lambda: kept_something(run), "a kept sample")
    os.kill(run.named(victim)[0], signal.SIGKILL)
    code, _, said = run.end()

    assert code == 0, said
    assert result(run.out / "b") == result(quiet / "b")
    assert decoded(run.out) < decoded(quiet)
    run.assert_nothing_is_left()


TWO_STEPS: dict[str, Any] = {
    **CALC,
    "steps": 2,
    "checkpoint": {"every": 1},
    "task": {**CALC["task"], "latency": 0.2, "latency_jitter": 0.2},
}


def tear(run: Command) -> int:
    """Every entry of b; how many those are."""
    torn = 0
    for path in [path for root in stores_of(run.out) for path in root.glob("b+*")]:
        with suppress(FileNotFoundError):
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2] + bytes(9))
            torn += 1
    return torn


@pytest.mark.slow
def test_whatever_of_it_is_torn_a_killed_pipeline_learns_the_same(tmp_path: Path) -> None:
    """Samples are sampled again, and the last step is that of the checkpoint."""
    quiet = start(write_mix(tmp_path / "quiet", "concurrent", b=TWO_STEPS), tmp_path / "quiet" / "out")
    run = start(write_mix(tmp_path / "torn", "concurrent", b=TWO_STEPS), tmp_path / "torn" / "out")
    run.wait_for(lambda: remembers(run, "b/optimizer"), "a step")
    run.wait_for(lambda: remembers(run, "b/sampled/"), "a sample of the next one")
    (driver,) = run.named("driver:b")
    os.kill(driver, signal.SIGSTOP)  # so that it puts nothing more
    assert tear(run) >= 3, "samples, weights, optimizer"
    os.kill(driver, signal.SIGKILL)

    assert run.end()[0] == 0, run.said()
    assert quiet.end()[0] == 0, quiet.said()
    assert result(run.out / "b") == result(quiet.out / "b")
    assert run.said().count("it goes on from its last step") == 1
    assert "resuming after step 1" in run.said()
    run.assert_nothing_is_left()
