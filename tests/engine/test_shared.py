"""Members of a shared engine draw what each would draw alone, bit for bit, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import LetterTokenizer, random_model

from jigsawrl.engine.cuda.burst import LONGEST, ROUND
from jigsawrl.engine.engine import Engine
from jigsawrl.engine.runner import TILE
from jigsawrl.engine.shared import Member, SharedEngine
from jigsawrl.engine.types import Look, Pass, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.model.lora import TARGETS, add_lora, lora_state, share_base
from jigsawrl.model.transformer import Transformer

OPTIONS = {"num_blocks": 300, "block_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 64}
KINDS = {
    "a": (2, 4.0, {"q_proj", "v_proj"}),
    "b": (8, 4.0, set(TARGETS)),
    "c": (3, 9.0, {"down_proj", "k_proj", "up_proj"}),
    "plain": None,
}
"""Rank, alpha and targets of each member; one has no adapters."""
TEMPERATURES = {"a": 1.0, "b": 0.7, "c": 0.0, "plain": 1.3}


def adapted(base: Transformer, name: str, version: int = 0) -> Transformer:
    """A member's model, as if trained up to a version."""
    model = share_base(base)
    if (kind := KINDS[name]) is not None:
        rank, alpha, targets = kind
        add_lora(model, rank, alpha, targets, seed=ord(name))
        train(model, version)
    return model


def train(model: Transformer, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for tensor in lora_state(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)


def shared_engine(base: Transformer, **changes) -> SharedEngine:
    return SharedEngine(base, deterministic=True, **{**OPTIONS, **changes})


def join(engine: SharedEngine, name: str, passes: list[Pass] | None = None) -> Member:
    model = adapted(engine.base, name)
    return engine.join(name, model, LetterTokenizer(), None if passes is None else passes.append)


def requests_of(name: str, count: int = 3, samples: int = 2, max_tokens: int = 10, **params) -> list[Request]:
    """Prompts that all members have in common; only their keys differ."""
    rng = random.Random(1)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURES[name], **params)
    prompts = [[rng.randrange(1, 61) for _ in range(rng.randrange(1, 20))] for _ in range(count)]
    return [
        Request(f"r{i}", prompt, sampling, [SampleKey(7, name, 0, i, s) for s in range(samples)])
        for i, prompt in enumerate(prompts)
    ]


def everything_of(outputs: Iterable[SampleOutput]) -> dict[SampleKey, tuple]:
    return {
        o.key: (o.generated.token_ids, o.generated.logprobs, o.generated.versions, o.finish_reason)
        for o in outputs
    }


def alone(base: Transformer, name: str, requests: list[Request]) -> dict[SampleKey, tuple]:
    engine = Engine(adapted(base, name), LetterTokenizer(), deterministic=True, **OPTIONS)
    return everything_of(engine.generate(requests))


def finish(engine: SharedEngine, outputs: dict[str, list[SampleOutput]]) -> None:
    for _ in range(2000):
        if not engine.has_unfinished():
            return
        for name, ended in engine.step().items():
            outputs.setdefault(name, []).extend(ended)
    raise AssertionError("somebody waits for ever")


def collecting(outputs: list[SampleOutput], then: bool) -> Look:
    """Takes what has ended; `then`: and has something else to see to."""

    def look(ended: list[SampleOutput]) -> bool:
        outputs.extend(ended)
        return then

    return look


BASE = random_model()
NAMES = list(KINDS)
EXPECTED = {name: alone(BASE, name, requests_of(name)) for name in NAMES}


def test_adapters_matter_and_every_member_has_its_own():
    tokens = [tuple(tuple(each[0]) for each in EXPECTED[name].values()) for name in NAMES]
    assert len(set(tokens)) == len(NAMES)


@mock.patch("jigsawrl.engine.cuda.burst.ROUND", 2)
@mock.patch("jigsawrl.engine.shared.ROUND", 2)
@mock.patch("jigsawrl.engine.shared.LONGEST", 8)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_member_draws_what_it_draws_alone(data):
    """Whoever is there, in whatever order they come, with pauses, in scarce blocks and rows, a pass at a time or in
    bursts of steps that are read late, of one round or of several: same bits."""
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    engine = shared_engine(
        BASE,
        num_blocks=data.draw(st.integers(8, 60)),
        max_num_seqs=data.draw(st.integers(1, 12)),
        max_num_batched_tokens=data.draw(st.integers(4, 64)),
    )
    members = {name: join(engine, name) for name in names}
    if data.draw(st.booleans()):
        FakeDevice(engine)
    todo = data.draw(st.permutations([(name, request) for name in names for request in requests_of(name)]))
    outputs: dict[str, list[SampleOutput]] = {name: [] for name in names}
    for name, request in todo:
        members[name].add_request(request)
        for _ in range(data.draw(st.integers(0, 3))):
            stepped = members[data.draw(st.sampled_from(names))]
            look = data.draw(st.sampled_from([None, False, True]))
            outputs[stepped.name] += stepped.step(
                None if look is None else collecting(outputs[stepped.name], look)
            )
        toggled = members[data.draw(st.sampled_from(names))]
        toggled.go_on() if toggled.paused else toggled.pause()
    for member in members.values():
        member.go_on()
    finish(engine, outputs)
    for name, member in members.items():
        outputs[name] += member.take()  # what ended while another one was asked for its samples
    assert {name: everything_of(outputs[name]) for name in names} == {n: EXPECTED[n] for n in names}
    assert len(engine.blocks.free) == engine.blocks.num_blocks
    assert not any(member.has_unfinished() for member in members.values())


def test_a_burst_ends_when_a_member_has_all_its_samples_or_someone_is_in_a_hurry():
    """Steps are read one late, so it is one step on by then."""
    engine = shared_engine(BASE)
    passes: list[Pass] = []
    members = {"plain": join(engine, "plain", passes), "a": join(engine, "a")}
    device = FakeDevice(engine)
    for name, length in (("plain", 100), ("a", 4)):
        for request in requests_of(name, max_tokens=length, ignore_eos=True):
            members[name].add_request(request)
    engine.step()  # prompts, and the first tokens
    assert len(engine.step()["a"]) == 6
    assert device.bursts == [4], "three, and one that was on its way"
    engine.step()
    assert device.bursts == [4, ROUND], "nobody ends"
    members["plain"].on_pass = lambda _: engine.nudge()
    engine.step()
    assert device.bursts == [4, ROUND, 2], "after the first that was read"
    members["plain"].on_pass = None
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    assert [len(output.generated.token_ids) for output in outputs["plain"]] == [100] * 6


def with_a_long_and_a_short_one(**changes) -> tuple[SharedEngine, Member, FakeDevice]:
    """An engine that has read both prompts."""
    engine = shared_engine(BASE, **changes)
    member, device = join(engine, "plain"), FakeDevice(engine)
    for number, length in enumerate((150, ROUND + 4)):
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        member.add_request(Request(str(number), [1, 2, 3], sampling, [SampleKey(7, "plain", 0, number, 0)]))
    engine.step()
    return engine, member, device


def test_a_burst_goes_on_while_whoever_asked_for_it_sees_to_everything_else():
    engine, member, device = with_a_long_and_a_short_one()
    seen: list[tuple[int, list[str]]] = []

    def look(ended: list[SampleOutput]) -> bool:
        seen.append((device.bursts[-1], [output.request_id for output in ended]))
        return len(seen) == 4

    assert member.step(look) == [], "it was given the short one before"
    assert device.bursts == [LONGEST]
    assert seen == [(ROUND, []), (2 * ROUND, ["1"]), (3 * ROUND, [])]
    assert member.step(look) == []
    assert device.bursts == [LONGEST, ROUND], "until it has something else to see to"
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    (output,) = outputs["plain"]
    assert len(output.generated.token_ids) == 150


def test_a_burst_takes_fewer_blocks_where_there_are_few_or_somebody_waits_for_them():
    _, member, device = with_a_long_and_a_short_one(num_blocks=40)
    member.step(lambda ended: False)
    assert device.bursts == [LONGEST // 2], "for more than that it would take over half of what there is"
    engine, member, device = with_a_long_and_a_short_one(max_num_seqs=2)
    for request in requests_of("plain", count=1, samples=1):
        member.add_request(request)
    free = len(engine.blocks.free)
    member.step(lambda ended: False)
    assert device.bursts == [ROUND]
    assert free - len(engine.blocks.free) <= 2 * (1 + ROUND // OPTIONS["block_size"])


def test_every_product_of_deterministic_mode_has_whole_tiles_of_rows():
    rows: list[int] = []
    engine = shared_engine(BASE)
    product = engine.runner.linear
    engine.runner.linear = lambda x, weight, bias: (rows.append(len(x)), product(x, weight, bias))[1]
    for name in NAMES:
        member = join(engine, name)
        for request in requests_of(name):
            member.add_request(request)
    finish(engine, {})
    assert {count % TILE for count in rows} == {0}
    assert max(rows) > TILE


def test_at_full_speed_members_draw_the_same_up_to_rounding():
    requests = {name: requests_of(name, max_tokens=6, ignore_eos=True) for name in NAMES}
    engine = SharedEngine(BASE, **OPTIONS)
    for name in NAMES:
        member = join(engine, name)
        for request in requests[name]:
            member.add_request(request)
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    for name in NAMES:
        expected = alone(BASE, name, requests[name])
        for output in outputs[name]:
            tokens, logprobs, *_ = expected[output.key]
            assert output.generated.token_ids == tokens
            assert output.generated.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_new_weights_of_one_member_change_nothing_for_the_others():
    requests = {name: requests_of(name, max_tokens=16, ignore_eos=True) for name in NAMES}
    lonely = {name: alone(BASE, name, requests[name]) for name in NAMES}
    passes: dict[str, list[Pass]] = {name: [] for name in NAMES}
    engine = shared_engine(BASE)
    members = {name: join(engine, name, passes[name]) for name in NAMES}
    single = Engine(adapted(BASE, "b"), LetterTokenizer(), deterministic=True, **OPTIONS)
    for name, member in members.items():
        for request in requests[name]:
            member.add_request(request)
    for request in requests["b"]:
        single.add_request(request)
    for _ in range(6):
        engine.step()
        single.step()
    for model, user in ((members["b"].model, members["b"]), (single.model, single)):
        train(model, version=5)
        user.update_weights(None, weight_version=5)
        assert user.version == 5
    prefilled = {name: sum(p.prefill_tokens for p in each) for name, each in passes.items()}
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    again: list[SampleOutput] = []
    while single.has_unfinished():
        again += single.step()
    for name in ("a", "c", "plain"):
        assert everything_of(outputs[name]) == lonely[name]
        assert sum(p.prefill_tokens for p in passes[name]) == prefilled[name]  # nothing of theirs ran again
    assert everything_of(outputs["b"]) == everything_of(again)
    assert {v for o in outputs["b"] for v in o.generated.versions} == {0, 5}
    assert everything_of(outputs["b"]) != lonely["b"]


def test_adapter_weights_can_be_handed_over_by_name():
    engine = shared_engine(BASE)
    member = join(engine, "c")
    trained = adapted(BASE, "c", version=9)
    member.update_weights(lora_state(trained).items(), weight_version=9)
    for request in requests_of("c"):
        member.add_request(request)
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    reference = Engine(trained, LetterTokenizer(), deterministic=True, **OPTIONS)
    reference.version = 9
    assert everything_of(outputs["c"]) == everything_of(reference.generate(requests_of("c")))


def test_a_prefix_is_found_by_its_own_member_alone():
    passes: dict[str, list[Pass]] = {"a": [], "b": []}
    engine = shared_engine(BASE)
    members = {name: join(engine, name, passes[name]) for name in passes}
    prompt = list(range(1, 23))

    def prefilled(name: str, step: int) -> int:
        passes[name].clear()
        request = Request("r", prompt, SamplingParams(max_tokens=4), [SampleKey(7, name, step, 0, 0)])
        members[name].add_request(request)
        finish(engine, {})
        return sum(p.prefill_tokens for p in passes[name])

    assert prefilled("a", 0) == 22
    assert prefilled("b", 0) == 22
    assert prefilled("a", 1) == 2
    members["a"].update_weights(None, weight_version=1)
    assert prefilled("b", 1) == 2
    assert prefilled("a", 2) == 22
    members["b"].close()
    join(engine, "b", passes["b"])
    assert not any(owner_root == -2 for owner_root, _ in engine.blocks.cached)


def test_aborted_samples_of_one_member_go_on_elsewhere_and_others_do_not_notice():
    engine = shared_engine(BASE)
    members = {name: join(engine, name) for name in ("a", "b")}
    requests = {name: requests_of(name, max_tokens=10) for name in members}
    for name, member in members.items():
        for request in requests[name]:
            member.add_request(request)
    outputs = {name: [] for name in members}
    for _ in range(4):
        for name, ended in engine.step().items():
            outputs[name] += ended
    (first, *_) = members["b"].abort(["r0"])
    assert 0 < len(first.generated.token_ids) < 10
    partials = [first, *_, *members["b"].abort()]
    assert not members["b"].has_unfinished()
    finish(engine, outputs)
    assert everything_of(outputs["a"]) == EXPECTED["a"]
    prompts = {request.request_id: request.prompt_token_ids for request in requests["b"]}
    for p in partials:
        name = f"{p.request_id}/{p.key.sample}"
        members["b"].add_request(
            Request(name, prompts[p.request_id], requests["b"][0].params, [p.key], p.generated)
        )
    finish(engine, outputs)
    assert everything_of(outputs["b"]) == EXPECTED["b"]


def test_a_step_of_one_member_keeps_what_others_have_ended():
    engine = shared_engine(BASE)
    members = {name: join(engine, name) for name in ("a", "plain")}
    for name, member in members.items():
        for request in requests_of(name):
            member.add_request(request)
    outputs: list[SampleOutput] = []
    while engine.has_unfinished():
        outputs += members["a"].step()
    assert everything_of(outputs) == EXPECTED["a"]
    assert not members["a"].has_unfinished()
    assert members["plain"].has_unfinished()
    assert everything_of(members["plain"].step()) == EXPECTED["plain"]
    assert not members["plain"].has_unfinished()


def test_members_leave_and_sleep_while_others_run():
    engine = shared_engine(BASE)
    members = {name: join(engine, name) for name in ("a", "b", "c")}
    for name, member in members.items():
        for request in requests_of(name):
            member.add_request(request)
    outputs: dict[str, list[SampleOutput]] = {}
    for _ in range(3):
        for name, ended in engine.step().items():
            outputs.setdefault(name, []).extend(ended)
    members["c"].close()
    saved = {name: tensor.clone() for name, tensor in lora_state(members["b"].model).items()}
    members["b"].sleep(level=2)
    with pytest.raises(RuntimeError, match="wake_up"):
        members["b"].add_request(requests_of("b")[0])
    finish(engine, outputs)
    assert everything_of(outputs["a"]) == EXPECTED["a"]
    assert "c" not in outputs
    members["a"].sleep()
    assert engine.runner.cache is None
    members["b"].wake_up(["weights"])
    members["b"].update_weights(saved.items(), weight_version=0)
    members["b"].wake_up(["kv_cache"])
    finish(engine, outputs)
    assert everything_of(outputs["b"]) == EXPECTED["b"]
    members["a"].close()
    members["b"].close()
    assert engine.runner.cache is None
    late = join(engine, "c")
    for request in requests_of("c"):
        late.add_request(request)
    finish(engine, outputs)
    assert everything_of(outputs["c"]) == EXPECTED["c"]


def test_whoever_comes_later_does_not_wait_for_anothers_whole_queue():
    engine = shared_engine(BASE, num_blocks=12, max_num_seqs=4)
    busy, late = join(engine, "a"), join(engine, "b")
    for request in requests_of("a", count=40, samples=1, max_tokens=8):
        busy.add_request(request)
    for _ in range(3):
        engine.step()
    for request in requests_of("b", count=3, samples=1, max_tokens=8):
        late.add_request(request)
    outputs: list[SampleOutput] = []
    while late.has_unfinished():
        outputs += late.step()
    assert len(busy.abort()) > 25
    assert len(outputs) == 3


def test_a_paused_member_keeps_nobody_from_the_room_it_holds():
    engine = shared_engine(BASE, num_blocks=8, max_num_seqs=2)
    first, second = join(engine, "a"), join(engine, "b")
    for request in requests_of("a"):
        first.add_request(request)
    engine.step()
    first.pause()
    assert not engine.has_unfinished()
    assert engine.step() == {}
    for request in requests_of("b"):
        second.add_request(request)
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    assert everything_of(outputs["b"]) == EXPECTED["b"]
    assert first.has_unfinished()
    first.go_on()
    finish(engine, outputs)
    assert everything_of(outputs["a"]) == EXPECTED["a"]


def test_with_room_enough_a_paused_member_stays_where_it_is():
    passes: list[Pass] = []
    engine = shared_engine(BASE)
    first, second = join(engine, "a", passes), join(engine, "b")
    for request in requests_of("a"):
        first.add_request(request)
    engine.step()
    prefilled = sum(p.prefill_tokens for p in passes)
    first.pause()
    for request in requests_of("b"):
        second.add_request(request)
    outputs: dict[str, list[SampleOutput]] = {}
    finish(engine, outputs)
    first.go_on()
    finish(engine, outputs)
    assert everything_of(outputs["a"]) == EXPECTED["a"]
    assert sum(p.prefill_tokens for p in passes) == prefilled


def test_only_models_on_the_same_base_can_join_and_only_under_a_name_of_their_own():
    engine = shared_engine(BASE)
    join(engine, "a")
    with pytest.raises(ValueError, match="there is a member a already"):
        join(engine, "a")
    with pytest.raises(ValueError, match="does not share"):
        engine.join("stranger", random_model(), LetterTokenizer())
    with pytest.raises(ValueError, match="adapters of its own cannot be shared"):
        shared_engine(adapted(BASE, "a")).join("a", adapted(BASE, "a"), LetterTokenizer())
    assert list(engine.members) == ["a"]
