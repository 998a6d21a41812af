"""Engines on a GPU: prompts in packed passes, decoding in graphs, adapters that change, weights that sleep."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from adapted_models import KINDS, adapted, bfloat16_model, causal, distance, in_float32, train
from small_models import LetterTokenizer

from jigsawrl.engine.engine import Engine
from jigsawrl.engine.sequence import Owner, Sequence
from jigsawrl.engine.shared import SharedEngine
from jigsawrl.engine.types import Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.model.lora import add_lora, share_base
from jigsawrl.model.transformer import Transformer

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of the Hopper kind or newer", allow_module_level=True)

from jigsawrl.engine.cuda.cuts import Cut
from jigsawrl.engine.cuda.decoder import Decoder, Launched, rung
from jigsawrl.engine.cuda.graphs import Graphs
from jigsawrl.engine.cuda.prefill import LADDER as PREFILL_LADDER
from jigsawrl.engine.cuda.prefill import Chunks

CUDA = torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 17, 500, PREFILL_LADDER[-1], PREFILL_LADDER[-1] + 1])
def test_a_packed_pass_is_the_forward_of_each_sequences_own_model_and_waits_for_nothing(rows):
    base = bfloat16_model("qwen3", **KINDS[1][1])
    engine = SharedEngine(base, num_blocks=400, max_num_seqs=16, max_num_batched_tokens=2048)
    models = [base, *(adapted(base, number) for number in range(3))]
    for number, model in enumerate(models):
        engine.join(str(number), model, LetterTokenizer())
    decoder = engine.runner.decoder
    assert decoder is not None
    rng, size = random.Random(rows), 16
    cuts = sorted(rng.sample(range(1, rows), min(rows - 1, 7)))
    lengths = [b - a for a, b in pairwise([0, *cuts, rows])]
    contexts = [rng.randrange(100) for _ in lengths]
    whose = [rng.randrange(4) for _ in lengths]
    sequences = [
        torch.randint(0, 1000, (context + length,)) for context, length in zip(contexts, lengths, strict=True)
    ]
    slots = [-1 if who == 0 else decoder.slot_of(Owner(who)) for who in whose]
    blocks, given = [], 0
    for sequence in sequences:
        blocks.append(list(range(given, given + -(-len(sequence) // size))))
        given += len(blocks[-1])

    def run(spans: list[tuple[int, int]]) -> torch.Tensor:
        tokens = np.concatenate([s[a:b].numpy() for s, (a, b) in zip(sequences, spans, strict=True)])
        positions = [np.arange(a, b) for a, b in spans]
        places = [np.array(b)[p // size] * size + p % size for b, p in zip(blocks, positions, strict=True)]
        ends = np.array(spans)
        chunks = Chunks(ends[:, 1] - ends[:, 0], ends[:, 0], np.array(slots), blocks)
        return decoder.prefill.run(tokens, np.concatenate(positions), np.concatenate(places), chunks)

    run([(0, max(context, 1)) for context in contexts])
    spans = [(context, len(s)) for context, s in zip(contexts, sequences, strict=True)]
    for _ in range(2):  # the second time it is captured
        run(spans)
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden = run(spans)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    start = 0
    for who, context, sequence in zip(whose, contexts, sequences, strict=True):
        reference, count = in_float32(models[who]), len(sequence) - context
        with torch.inference_mode():
            wanted = reference(sequence.to(CUDA), torch.arange(len(sequence), device=CUDA), causal)
        assert distance(hidden[start : start + count], wanted[context:]) < 0.03
        start += count


def make_requests(count: int, samples: int, **params) -> list[Request]:
    rng = random.Random(5)
    sampling = SamplingParams(**params)
    return [
        Request(
            f"r{i}",
            [rng.randrange(1, 60) for _ in range(rng.randrange(1, 70))],
            sampling,
            [SampleKey(3, "p", 0, i, s) for s in range(samples)],
        )
        for i in range(count)
    ]


def check_logprobs(reference: Transformer, requests: list[Request], outputs: list[SampleOutput]) -> None:
    """What was drawn has the log-prob that the float32 model gives it."""
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    for output in outputs:
        prompt, drawn = prompts[output.request_id], output.generated.token_ids
        tokens = torch.tensor(prompt + drawn, device=CUDA)
        with torch.inference_mode():
            hidden = reference(tokens, torch.arange(len(tokens), device=CUDA), causal)
            logprobs = (hidden @ reference.head.T).log_softmax(1)[len(prompt) - 1 : -1]
        theirs = logprobs.gather(1, torch.tensor(drawn, device=CUDA)[:, None])[:, 0].cpu()
        assert (torch.tensor(output.generated.logprobs) - theirs).abs().mean() < 0.03


def make_engine(model: Transformer, **changes) -> Engine:
    options = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 256}
    return Engine(model, LetterTokenizer(), **{**options, **changes})


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str
)
def test_an_engine_on_cuda_draws_what_the_model_says_and_gives_everything_back(params):
    model = bfloat16_model("qwen2", vocab_size=61, **KINDS[0][1])
    requests = make_requests(20, 3, max_tokens=40, **params)
    engine = make_engine(model)
    assert engine.runner.decoder is not None
    outputs = engine.generate(requests)
    assert len(outputs) == 60
    assert all(o.finish_reason == "length" or o.generated.token_ids[-1] == 0 for o in outputs)
    assert all(0 not in o.generated.token_ids[:-1] for o in outputs)
    if "top_k" not in params:
        check_logprobs(in_float32(model), requests, outputs)
    assert len(engine.blocks.free) == 400
    assert set(engine.blocks.references) == {0}


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_a_decode_step_waits_for_nothing_once_its_graph_is_there(params, monkeypatch):
    engine = make_engine(bfloat16_model("qwen2", vocab_size=61, **KINDS[0][1]))
    launch, watched = Decoder.launch, []

    def launched(self: Decoder, sequences: list[Sequence], ahead: int, cut: Cut) -> Launched:
        step = rung(len(sequences)), cut, not params, self.yields
        if self.graphs.known.get((step, torch.cuda.current_stream().cuda_stream)) is None:
            return launch(self, sequences, ahead, cut)
        watched.append(step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, sequences, ahead, cut)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Decoder, "launch", launched)
    engine.generate(make_requests(4, 2, max_tokens=40, ignore_eos=True, **params))
    assert len(watched) > 20


def drawn_in_steps(
    engine: Engine, requests: list[Request], before: Callable[[int], None]
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of all samples; `before` is called before each step."""
    for request in requests:
        engine.add_request(request)
    found: list[SampleOutput] = []
    for step in itertools.count():
        if not engine.has_unfinished():
            break
        before(step)
        found += engine.step()
    return sorted((each.generated.token_ids, each.generated.logprobs) for each in found)


def test_what_is_drawn_does_not_depend_on_leaving_room_to_others():
    model = bfloat16_model("qwen2", vocab_size=61, **KINDS[0][1])
    requests = make_requests(20, 3, max_tokens=200, ignore_eos=True)

    def drawn(yields: Callable[[int], bool]) -> list[tuple[list[int], list[float]]]:
        engine = make_engine(model, num_blocks=2000)

        def before(step: int) -> None:
            engine.yields = yields(step)

        found = drawn_in_steps(engine, requests, before)
        assert engine.runner.decoder is not None
        steps = [key for key, _ in engine.runner.decoder.graphs.known if any(isinstance(e, Cut) for e in key)]
        assert {way for *_, way in steps} == {yields(0), yields(1)}
        return found

    alone = drawn(lambda step: False)
    assert len(alone) == 60
    assert drawn(lambda step: True) == alone
    assert drawn(lambda step: step % 2 == 1) == alone


@pytest.mark.parametrize(
    "shape", [KINDS[0][1], {**KINDS[0][1], "hidden_size": 1536, "intermediate_size": 8960}], ids=str
)
def test_what_is_drawn_does_not_depend_on_the_half_of_the_gpu_that_it_is_confined_to(shape):
    from jigsawrl.runtime.green import parts_of
    from jigsawrl.runtime.shares import Units, half

    model = bfloat16_model("qwen2", vocab_size=61, **shape)
    requests = make_requests(20, 3, max_tokens=100, ignore_eos=True)
    parts = parts_of(0)
    whole = tuple(range(parts.units))

    def drawn(where: Callable[[int], Units]) -> list[tuple[list[int], list[float]]]:
        engine = make_engine(model, num_blocks=2000)
        engine.yields = True
        found = drawn_in_steps(engine, requests, lambda step: parts.move_to(where(step)))
        parts.move_to(whole)
        return found

    free = drawn(lambda step: whole)
    assert len(free) == 60
    assert drawn(lambda step: half(whole)) == free
    assert drawn(lambda step: half(whole) if step % 20 < 10 else whole) == free


def test_a_tight_cache_preempts_and_long_prefixes_are_found_again():
    model = bfloat16_model("qwen3", vocab_size=61, **KINDS[1][1])
    requests = make_requests(12, 4, max_tokens=90, ignore_eos=True)
    engine = make_engine(model, num_blocks=60)
    outputs = engine.generate(requests)
    assert engine.scheduler.preemptions > 0
    assert [len(o.generated.token_ids) for o in outputs] == [90] * 48
    check_logprobs(in_float32(model), requests, outputs)
    turn = requests[0].prompt_token_ids + outputs[0].generated.token_ids + [7, 8]
    again = [Request("again", turn, SamplingParams(max_tokens=30), [SampleKey(3, "p", 1, 0, 0)])]
    check_logprobs(in_float32(model), again, engine.generate(again))


def test_new_weights_and_sleep_leave_no_trace_of_the_old():
    model = bfloat16_model("llama", vocab_size=61, **KINDS[2][1])
    requests = make_requests(6, 2, max_tokens=40, ignore_eos=True)
    engine = make_engine(model)
    engine.generate(requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(None, 1)
    outputs = engine.generate(requests)
    assert outputs[0].generated.versions == [1] * 40
    check_logprobs(in_float32(model), requests, outputs)
    engine.sleep(1)
    assert engine.runner.decoder is None
    elsewhere = torch.zeros(10_000_000, device=CUDA)  # so that the weights come back to another place
    engine.wake_up()
    check_logprobs(in_float32(model), requests, engine.generate(requests))
    del elsewhere


def test_members_of_a_shared_engine_draw_what_their_own_models_say():
    base = bfloat16_model("qwen2", vocab_size=61, **KINDS[0][1])
    options = {"num_blocks": 400, "max_num_seqs": 128, "max_num_batched_tokens": 256}
    engine = SharedEngine(base, **options)
    models = [base, *(adapted(base, number) for number in range(3))]
    members = [engine.join(str(i), model, LetterTokenizer()) for i, model in enumerate(models)]
    assert engine.runner.decoder is not None
    requests = make_requests(6, 4, max_tokens=40, ignore_eos=True)
    for turn in range(2):
        for member in members:
            for request in requests:
                member.add_request(request)
        outputs: dict[str, list[SampleOutput]] = {}
        while engine.has_unfinished():
            for name, ended in engine.step().items():
                outputs.setdefault(name, []).extend(ended)
        for member in members:
            assert len(outputs[member.name]) == 24
            assert {v for o in outputs[member.name] for v in o.generated.versions} == {member.version}
            check_logprobs(in_float32(member.model), requests, outputs[member.name])
        if turn == 0:  # one learns, one leaves, one comes with a rank that is new
            train(models[1])
            members[1].update_weights(None, weight_version=3)
            members.pop(2).close()
            late = share_base(base)
            add_lora(late, rank=64, alpha=32.0, targets={"down_proj", "gate_proj"}, seed=9)
            train(late)
            members.append(engine.join("late", late, LetterTokenizer()))
            members[0].pause()
            assert not engine.has_unfinished()
            members[0].go_on()


def test_an_engine_with_adapters_follows_their_training():
    model = adapted(bfloat16_model("llama", vocab_size=61, **KINDS[2][1]), 1)
    requests = make_requests(6, 2, max_tokens=40, ignore_eos=True)
    engine = make_engine(model)
    assert engine.runner.decoder is not None
    for version in range(3):
        check_logprobs(in_float32(model), requests, engine.generate(requests))
        train(model)
        engine.update_weights(None, weight_version=version + 1)
    engine.sleep(1)
    engine.wake_up()
    check_logprobs(in_float32(model), requests, engine.generate(requests))


def test_what_other_threads_do_on_any_stream_becomes_no_part_of_a_graph():
    ours, theirs = torch.zeros(1, device=CUDA), torch.zeros(1, device=CUDA)
    pool = [torch.cuda.Stream() for _ in range(64)]  # all that torch has, twice

    def train() -> None:
        for stream in pool:
            with torch.cuda.stream(stream):
                theirs.add_(1)
                stream.synchronize()

    def launch() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        ours.add_(1)

    graphs = Graphs(bfloat16_model("llama", vocab_size=61, **KINDS[2][1]))
    for _ in range(4):  # runs, is captured and replayed, is replayed, and again
        graphs.run("step", launch)
    torch.cuda.synchronize()
    assert (ours.item(), theirs.item()) == (4, 128)


def test_deterministic_mode_and_unknown_models_take_the_present_path():
    model = bfloat16_model("llama", vocab_size=61, **KINDS[2][1])
    assert make_engine(model, deterministic=True).runner.decoder is None
    assert make_engine(model).runner.decoder is not None
    add_lora(model, rank=128, alpha=8.0, targets={"q_proj"}, seed=0)
    assert make_engine(model).runner.decoder is None
    assert make_engine(bfloat16_model("llama", vocab_size=61, **KINDS[2][1]).float()).runner.decoder is None
