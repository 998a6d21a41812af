"""What was drawn before a death is not drawn again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mixes import CALC, Command, result, start, stores_of, write_mix

from jigsawrl.engine.types import Generated, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.runtime.drawn import Drawn
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
    before = Drawn(store, "a")
    before.note(request, output(request, 0, [5, 6]))
    before.keep([(request, output(request, 1, [8], ended=False))])

    known, rest = Drawn(store, "a").answered(request)

    assert known == [output(request, 0, [5, 6])]
    assert [(each.keys, each.partial and each.partial.token_ids) for each in rest] == [
        ([request.keys[1]], [8]),
        ([request.keys[2]], None),
    ]


def test_of_two_words_about_one_sample_the_longer_counts_and_its_end_most(store: Store) -> None:
    request = asked([1], samples=2)
    before = Drawn(store, "a")
    paused = [output(request, 0, [4, 4, 4], ended=False), output(request, 0, [4], ended=False)]
    before.keep([(request, each) for each in [*paused, output(request, 1, [9], ended=False)]])
    before.note(request, output(request, 1, [9, 9]))
    before.keep([])

    known, (goes_on,) = Drawn(store, "a").answered(request)

    assert known == [output(request, 1, [9, 9])]
    assert goes_on.partial is not None
    assert goes_on.partial.token_ids == [4, 4, 4]


def test_another_prompt_is_another_sample(store: Store) -> None:
    """An environment that answers differently the second time."""
    before = Drawn(store, "a")
    before.note(asked([1, 2]), output(asked([1, 2]), 0, [5]))
    before.keep([])
    assert Drawn(store, "a").answered(asked([1, 3])) == ([], [asked([1, 3])])


def test_what_was_said_of_an_episodes_turn_is_not_taken_for_its_next_one(store: Store) -> None:
    """An engine's last word may be about a turn that has ended since; all turns have the sample's key."""
    turns = [
        Request(f"7/0/{turn}", prompt, PARAMS, asked([]).keys[:1])
        for turn, prompt in enumerate(([1], [1, 5, 2]))
    ]
    under_way = SampleOutput("7/0/0", turns[0].keys[0], Generated([5], [-0.5], [3]), "abort")
    before = Drawn(store, "a")
    before.note(turns[0], SampleOutput("7/0/0", turns[0].keys[0], Generated([5], [-0.5], [3]), "stop"))
    before.keep([(turns[1], under_way)])
    after = Drawn(store, "a")
    assert [each.generated.token_ids for each in after.answered(turns[0])[0]] == [[5]]
    assert after.answered(turns[1]) == ([], [turns[1]])


def test_nothing_stays_in_the_store_when_the_step_is_over(store: Store) -> None:
    request = asked([1])
    first = Drawn(store, "a")
    first.note(request, output(request, 0, [5]))
    first.keep([(request, output(request, 1, [5], ended=False))])
    second = Drawn(store, "a")
    second.answered(request)
    second.forget()
    assert store.names("a/") == []


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
    return any("b/drawn" in Store.attach(root).names("b/") for root in stores_of(run.out))


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
