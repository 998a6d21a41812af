"""The engine against transformers, and against itself under every kind of pressure."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import LetterTokenizer, random_model

from jigsawrl.engine.engine import Engine
from jigsawrl.engine.types import Request, SampleKey, SampleOutput, SamplingParams


def make_engine(model=None, **changes) -> Engine:
    options = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return Engine(model or random_model(), LetterTokenizer(), **{**options, **changes})


def key(prompt: int, sample: int = 0, step: int = 0) -> SampleKey:
    return SampleKey(seed=7, pipeline="p", step=step, prompt=prompt, sample=sample)


def make_requests(count: int = 6, samples: int = 3, max_tokens: int = 20, **params) -> list[Request]:
    rng = random.Random(1)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    prompts = [[rng.randrange(1, 61) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
    return [
        Request(f"r{i}", prompt, sampling, [key(i, s) for s in range(samples)])
        for i, prompt in enumerate(prompts)
    ]


def tokens_of(outputs: list[SampleOutput]) -> dict[SampleKey, list[int]]:
    return {output.key: output.generated.token_ids for output in outputs}


def everything_of(outputs: list[SampleOutput]) -> dict[SampleKey, tuple]:
    return {o.key: (o.generated.token_ids, o.generated.logprobs, o.finish_reason) for o in outputs}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(family, tmp_path):
    import transformers

    from jigsawrl.model.folder import export_model

    changes = {"head_dim": 24} if family == "qwen3" else {}
    model = random_model(family, tie_word_embeddings=family != "qwen2", **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    export_model(model, tmp_path, tmp_path / "hf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    requests = make_requests(samples=1, temperature=0.0, ignore_eos=True)
    for output, request in zip(make_engine(model).generate(requests), requests, strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        expected = reference.generate(
            prompt, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None, bos_token_id=None
        )[0, prompt.shape[1] :]
        assert output.generated.token_ids == expected.tolist()
        whole = torch.cat((prompt[0], expected))
        logprobs = reference(whole[None]).logits[0].log_softmax(-1)[prompt.shape[1] - 1 : -1]
        theirs = logprobs.gather(1, expected[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.generated.logprobs), theirs, atol=1e-4, rtol=1e-4)


def test_samples_of_one_prompt_share_its_prefill_and_its_blocks():
    passes = []
    engine = make_engine(on_pass=passes.append)
    prompt = list(range(1, 22))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request(Request("r", prompt, sampling, [key(0, s) for s in range(8)]))
    engine.step()
    assert passes[0].prefill_tokens == 21
    shared = set.intersection(*(set(s.blocks) for s in engine.scheduler.running))
    assert len(shared) == 5  # 21 tokens in blocks of 4: five full blocks belong to all eight samples
    assert len({s.blocks[5] for s in engine.scheduler.running}) == 8
    while engine.has_unfinished():
        engine.step()
    assert sum(p.prefill_tokens for p in passes) == 21


def test_cache_waste_is_less_than_one_block_a_sequence():
    engine = make_engine()
    for request in make_requests(max_tokens=25):
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
        for sequence in engine.scheduler.running:
            assert 0 <= len(sequence.blocks) * 4 - sequence.computed < 4
    assert len(engine.blocks.free) == 200
    assert set(engine.blocks.references) == {0}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cache_too_small_for_all_preempts_and_loses_nothing(deterministic):
    model = random_model()
    requests = make_requests(count=8, samples=4, max_tokens=30, ignore_eos=True)
    plenty = make_engine(model, deterministic=deterministic).generate(requests)
    tight = make_engine(model, num_blocks=18, deterministic=deterministic)
    squeezed = tight.generate(requests)
    assert tight.scheduler.preemptions > 0
    assert [len(o.generated.token_ids) for o in squeezed] == [30] * 32
    if deterministic:
        assert everything_of(squeezed) == everything_of(plenty)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_in_deterministic_mode_nothing_but_the_key_matters(data):
    """Order of arrival, batch limits, cache size, block size, neighbours, chunks: same bits."""
    model = random_model()
    requests = make_requests(count=5, samples=2, max_tokens=12)
    alone = [make_engine(model, deterministic=True).generate([request]) for request in requests]
    expected = everything_of([output for outputs in alone for output in outputs])
    engine = make_engine(
        model,
        deterministic=True,
        num_blocks=data.draw(st.integers(45, 120)),
        block_size=data.draw(st.sampled_from([1, 4, 8])),
        max_num_seqs=data.draw(st.integers(1, 12)),
        max_num_batched_tokens=data.draw(st.integers(1, 64)),
    )
    order = data.draw(st.permutations(requests))
    late = data.draw(st.integers(0, 4))
    for request in order[late:]:
        engine.add_request(request)
    outputs: list[SampleOutput] = []
    for request in order[:late]:
        outputs += engine.step()
        engine.add_request(request)
    while engine.has_unfinished():
        outputs += engine.step()
    assert everything_of(outputs) == expected


def test_abort_returns_partials_and_resuming_them_gives_the_tokens_of_an_undisturbed_run():
    model = random_model()
    requests = make_requests(count=4, samples=2, max_tokens=24)
    undisturbed = everything_of(make_engine(model, deterministic=True).generate(requests))
    engine = make_engine(model, deterministic=True)
    for request in requests:
        engine.add_request(request)
    outputs = [output for _ in range(7) for output in engine.step()]
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    partials = engine.abort()
    assert partials
    assert not engine.has_unfinished()
    assert all(len(p.generated.token_ids) == len(p.generated.logprobs) for p in partials)
    elsewhere = make_engine(model, deterministic=True, block_size=8)
    resumed = [
        Request(
            f"{p.request_id}/{p.key.sample}", prompts[p.request_id], requests[0].params, [p.key], p.generated
        )
        for p in partials
    ]
    outputs += elsewhere.generate(resumed)
    assert everything_of(outputs) == undisturbed


def test_the_budget_of_a_resumed_partial_counts_what_it_had():
    engine = make_engine()
    request = make_requests(count=1, samples=1, max_tokens=10, ignore_eos=True)[0]
    engine.add_request(request)
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort(["r0"])
    assert len(partial.generated.token_ids) == 4
    (output,) = engine.generate(
        [Request("again", request.prompt_token_ids, request.params, [key(0)], partial.generated)]
    )
    assert len(output.generated.token_ids) == 10
    with pytest.raises(ValueError, match="has used its 10 tokens"):
        engine.add_request(
            Request("more", request.prompt_token_ids, request.params, [key(0)], output.generated)
        )


def test_new_weights_are_used_from_the_next_token_and_recorded():
    model = random_model(seed=0)
    other = random_model(seed=1)
    from jigsawrl.model.folder import places

    engine = make_engine(model, deterministic=True)
    request = make_requests(count=1, samples=1, max_tokens=12, temperature=0.0, ignore_eos=True)[0]
    engine.add_request(request)
    for _ in range(5):
        engine.step()
    engine.update_weights(places(other).items(), weight_version=3)
    while engine.has_unfinished():
        (*_, output) = engine.step() or (None,)
    assert output.generated.versions == [0] * 5 + [3] * 7
    # The last seven tokens are those of the new model over the same prefix, with no trace of the old cache.
    prefix = request.prompt_token_ids + output.generated.token_ids[:5]
    fresh = make_engine(other, deterministic=True)
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    (expected,) = fresh.generate([Request("f", prefix, params, [key(0)])])
    assert output.generated.token_ids[5:] == expected.generated.token_ids
    assert output.generated.logprobs[5:] == expected.generated.logprobs


def test_cached_prefixes_are_found_again_and_dropped_with_their_weights():
    passes = []
    engine = make_engine(on_pass=passes.append)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    prompt = list(range(1, 20))
    (first,) = engine.generate([Request("a", prompt, sampling, [key(0)])])
    passes.clear()
    turn = prompt + first.generated.token_ids + [5, 6, 7]
    engine.generate([Request("b", turn, sampling, [key(0, step=1)])])
    assert passes[0].prefill_tokens == 30 - 24  # six full blocks of the first turn are found
    engine.update_weights(None, weight_version=1)
    passes.clear()
    engine.generate([Request("c", turn, sampling, [key(0, step=2)])])
    assert passes[0].prefill_tokens == 30


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up_keep_every_sequence(level):
    model = random_model()
    requests = make_requests(count=3, samples=2)
    expected = everything_of(make_engine(model, deterministic=True).generate(requests))
    from jigsawrl.model.folder import places

    saved = {name: tensor.clone() for name, tensor in places(model).items()}
    engine = make_engine(model, deterministic=True)
    for request in requests:
        engine.add_request(request)
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.sleep(level)
    with pytest.raises(RuntimeError, match="wake_up"):
        engine.step()
    engine.wake_up(["weights"])
    if level == 2:
        engine.update_weights(saved.items(), weight_version=0)
    engine.wake_up(["kv_cache"])
    while engine.has_unfinished():
        outputs += engine.step()
    assert everything_of(outputs) == expected


def test_stop_tokens_and_stop_strings_end_a_sample_and_keep_their_tokens():
    model = random_model()
    request = make_requests(count=1, samples=1, max_tokens=30, ignore_eos=True)[0]
    (free,) = make_engine(model).generate([request])
    tokens = free.generated.token_ids
    letters = "".join(LetterTokenizer.letters[t] for t in tokens)
    stop = letters[6:8]
    end = letters.index(stop) + 2
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=("nothing", stop))
    (cut,) = make_engine(model).generate([Request("r0", request.prompt_token_ids, params, request.keys)])
    assert (cut.generated.token_ids, cut.finish_reason) == (tokens[:end], "stop")
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(tokens[4],))
    (cut,) = make_engine(model).generate([Request("r0", request.prompt_token_ids, params, request.keys)])
    assert cut.generated.token_ids == tokens[: tokens.index(tokens[4]) + 1]


def test_a_request_that_can_never_fit_is_refused_at_once():
    engine = make_engine(num_blocks=4)
    with pytest.raises(ValueError, match="do not fit into 16 positions"):
        engine.add_request(Request("r", [1] * 10, SamplingParams(max_tokens=7), [key(0)]))
    with pytest.raises(ValueError, match="0 prompt tokens"):
        engine.add_request(Request("r", [], SamplingParams(max_tokens=7), [key(0)]))
    assert not engine.has_unfinished()
