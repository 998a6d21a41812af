"""vLLM, the real package, behind the engine's protocol (`make test-vllm`)."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from small_models import random_model

from jigsawrl.config.runfile import validated
from jigsawrl.engine.engine import Engine
from jigsawrl.engine.types import Pass, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.engine.vllm_backend import VllmEngine, model_weights
from jigsawrl.errors import JigsawError
from jigsawrl.model.folder import export_model, load_model, places
from jigsawrl.model.lora import add_lora, linears
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import Tokenizer, load_tokenizer
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline.trajectory import Trajectory, make_batch
from jigsawrl.trainer.trainer import evaluate, policy_logprobs

RUN_FILE = Path(__file__).parents[2] / "examples" / "arithmetic" / "run.yaml"
PROMPTS = ("12+7=", "3+4=", "What is the sum of one hundred and two, and of seventeen? It is ", "x")


def with_vllm(test):
    installed = find_spec("vllm") is not None
    return pytest.mark.vllm(pytest.mark.skipif(not installed, reason="needs vllm: make test-vllm")(test))


def make_config(**rollout):
    defaults = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_tokens": 64, "max_prompt_tokens": 128}
    rollout = {"backend": "vllm", **defaults, **rollout}
    return validated({"device": "cpu", "task": {"kind": "arithmetic"}, "rollout": rollout})


def tiny(folder: Path, seed: int) -> tuple[Path, Transformer, Tokenizer]:
    base = write_tiny(folder, layers=2, hidden=128, heads=4, kv_heads=2, seed=seed)
    return base, load_model(base, torch.float32), load_tokenizer(base, trust_remote_code=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[tuple[VllmEngine, list[Pass]]]:
    """One engine for all tests; each test gets it idle, awake and with the weights of version 0."""
    base, model, tokenizer = tiny(tmp_path_factory.mktemp("tiny"), seed=0)
    passes: list[Pass] = []
    engine = VllmEngine(model, base, tokenizer, make_config(), on_pass=passes.append)
    yield engine, passes
    engine.close()


@pytest.fixture
def engine(world) -> Iterator[VllmEngine]:
    engine, passes = world
    passes.clear()
    yield engine
    engine.abort()
    engine.wake_up()
    engine.update_weights(None, weight_version=0)


@pytest.fixture
def other(tmp_path) -> Transformer:
    return tiny(tmp_path, seed=1)[1]


def key(prompt: int, sample: int = 0, step: int = 0) -> SampleKey:
    return SampleKey(seed=7, pipeline="p", step=step, prompt=prompt, sample=sample)


def make_requests(tokenizer, samples: int = 2, **params) -> list[Request]:
    sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
    return [
        Request(f"r{i}", tokenizer.encode(text), sampling, [key(i, s) for s in range(samples)])
        for i, text in enumerate(PROMPTS)
    ]


def finish(engine) -> list[SampleOutput]:
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return sorted(outputs, key=lambda output: (output.key.prompt, output.key.sample))


def generate(engine, requests: list[Request]) -> list[SampleOutput]:
    for request in requests:
        engine.add_request(request)
    return finish(engine)


def own_engine(model: Transformer, tokenizer: Tokenizer) -> Engine:
    return Engine(model, tokenizer, num_blocks=200)


def tokens_of(outputs: list[SampleOutput]) -> list[list[int]]:
    return [output.generated.token_ids for output in outputs]


def assert_same(outputs: list[SampleOutput], expected: list[SampleOutput]) -> None:
    assert tokens_of(outputs) == tokens_of(expected)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert mine.generated.logprobs == pytest.approx(theirs.generated.logprobs, abs=1e-3)
        assert mine.finish_reason == theirs.finish_reason


def trainer_logprobs(model, prompt: list[int], output: SampleOutput, temperature: float) -> list[float]:
    generated = output.generated
    trajectory = Trajectory(0, 0, list(prompt), len(prompt))
    trajectory.add_turn(generated.token_ids, generated.logprobs, generated.versions)
    return evaluate(model, make_batch([trajectory]), 1024, policy_logprobs(model, temperature)).tolist()


@with_vllm
def test_greedy_tokens_and_logprobs_are_those_of_our_engine(engine):
    requests = make_requests(engine.tokenizer, samples=1, temperature=0.0, max_tokens=24)
    expected = generate(own_engine(engine.model, engine.tokenizer), requests)
    assert_same(generate(engine, requests), expected)


@with_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_sampled_tokens_are_those_a_trainer_computes_at_the_same_temperature(engine, temperature):
    requests = make_requests(engine.tokenizer, temperature=temperature)
    for output in generate(engine, requests):
        prompt = requests[output.key.prompt].prompt_token_ids
        expected = trainer_logprobs(engine.model, prompt, output, temperature)
        assert output.generated.logprobs == pytest.approx(expected, abs=1e-3)
        assert output.generated.versions == [0] * 12


@with_vllm
def test_samples_depend_on_their_key_and_not_on_the_order_of_arrival(engine):
    requests = make_requests(engine.tokenizer, samples=4)
    expected = tokens_of(generate(engine, requests))
    assert len(set(map(tuple, expected))) == len(expected)
    shuffled = [
        Request(f"{r.request_id}/{k.sample}", r.prompt_token_ids, r.params, [k])
        for r in requests
        for k in r.keys
    ]
    random.Random(0).shuffle(shuffled)
    outputs = []
    for request in shuffled:
        engine.add_request(request)
        outputs += engine.step()
    outputs += finish(engine)
    assert tokens_of(sorted(outputs, key=lambda o: (o.key.prompt, o.key.sample))) == expected


@with_vllm
def test_a_later_turn_of_a_sample_draws_other_numbers(engine):
    """The same key on a longer prompt, and a model that finds all tokens equally likely."""
    flat = {name: torch.zeros_like(tensor) for name, tensor in places(engine.model).items()}
    engine.update_weights(flat.items(), weight_version=1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (
        generate(engine, [Request("r", engine.tokenizer.encode(text), params, [key(0)])])
        for text in ("1+1=", "1+1=2, and ")
    )
    assert tokens_of(first) != tokens_of(second)


@with_vllm
def test_samples_of_one_prompt_share_the_full_blocks_of_its_prefill(world, engine):
    _, passes = world
    prompt = engine.tokenizer.encode("ab" * 35)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    generate(engine, [Request("r", prompt, params, [key(0, s) for s in range(4)])])
    assert sum(p.prefill_tokens for p in passes) == 70 + 3 * (70 - 64)  # blocks of 32
    assert [p.decode_tokens for p in passes if p.prefill_tokens == 0] == [4] * 4


@with_vllm
def test_truncated_sampling_takes_only_the_best_tokens(engine):
    greedy = generate(engine, make_requests(engine.tokenizer, temperature=0.0))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert tokens_of(generate(engine, make_requests(engine.tokenizer, **cut))) == tokens_of(greedy)


@with_vllm
def test_where_the_run_file_cuts_the_distribution_logprobs_are_those_before_the_cut(world, tmp_path):
    tokenizer, cut = world[0].tokenizer, {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
    base, model, _ = tiny(tmp_path, seed=1)
    engine = VllmEngine(model, base, tokenizer, make_config(**cut))
    requests = make_requests(tokenizer, **cut)
    for output in generate(engine, requests):
        expected = trainer_logprobs(model, requests[output.key.prompt].prompt_token_ids, output, 1.0)
        assert output.generated.logprobs == pytest.approx(expected, abs=1e-3)
    engine.close()


@with_vllm
def test_a_cache_too_small_for_all_loses_no_sample(world, tmp_path):
    tokenizer = world[0].tokenizer
    base, model, _ = tiny(tmp_path, seed=1)
    requests = make_requests(tokenizer, samples=4, max_tokens=60)
    roomy = VllmEngine(model, base, tokenizer, make_config())
    tight = VllmEngine(model, base, tokenizer, make_config(kv_cache_tokens=192))
    expected = generate(roomy, requests)
    assert {len(tokens) for tokens in tokens_of(expected)} == {60}
    assert_same(generate(tight, requests), expected)
    roomy.close()
    tight.close()


@with_vllm
def test_abort_returns_partials_that_resume_with_a_cumulative_budget_and_their_versions(engine, other):
    requests = make_requests(engine.tokenizer, samples=1)
    for request in requests:
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    partials = engine.abort(["r0", "r2"])
    assert [(p.request_id, p.finish_reason) for p in partials] == [("r0", "abort"), ("r2", "abort")]
    assert [len(p.generated.token_ids) for p in partials] == [5, 5]
    assert {o.request_id for o in finish(engine)} == {"r1", "r3"}
    engine.update_weights(places(other).items(), weight_version=2)
    resumed = [
        Request("again", requests[p.key.prompt].prompt_token_ids, requests[0].params, [p.key], p.generated)
        for p in partials
    ]
    for output, partial in zip(generate(engine, resumed), partials, strict=True):
        assert output.generated.token_ids[:5] == partial.generated.token_ids
        assert output.generated.logprobs[:5] == partial.generated.logprobs
        assert output.generated.versions == [0] * 5 + [2] * 7
        assert output.finish_reason == "length"
    used = Request("more", requests[0].prompt_token_ids, requests[0].params, [key(0)], output.generated)
    with pytest.raises(ValueError, match="has used its 12 tokens"):
        engine.add_request(used)
    assert not engine.has_unfinished()


@with_vllm
def test_new_weights_are_used_from_the_next_token_and_recorded(engine, other):
    requests = make_requests(engine.tokenizer, samples=1, temperature=0.0)
    for request in requests:
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    engine.update_weights(places(other).items(), weight_version=3)
    outputs = finish(engine)
    # The last seven tokens are those of the new model over the same prefix, with no trace of the old cache.
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    continued = [
        Request(r.request_id, r.prompt_token_ids + o.generated.token_ids[:5], params, r.keys)
        for r, o in zip(requests, outputs, strict=True)
    ]
    expected = generate(own_engine(other, engine.tokenizer), continued)
    for output, end in zip(outputs, expected, strict=True):
        assert output.generated.versions == [0] * 5 + [3] * 7
        assert output.generated.token_ids[5:] == end.generated.token_ids
        assert output.generated.logprobs[5:] == pytest.approx(end.generated.logprobs, abs=1e-3)


@with_vllm
def test_weights_change_the_output_and_change_it_back(engine, other):
    requests = make_requests(engine.tokenizer, samples=1, temperature=0.0)
    before = generate(engine, requests)
    engine.update_weights(places(other).items(), weight_version=1)
    changed = generate(engine, requests)
    assert_same(changed, generate(own_engine(other, engine.tokenizer), requests))
    assert tokens_of(changed) != tokens_of(before)
    engine.update_weights(None, weight_version=2)
    assert_same(generate(engine, requests), before)
    with pytest.raises(JigsawError, match="lacks 19 weights"):
        engine.update_weights([("model.norm.weight", engine.model.norm.weight.data)], weight_version=3)


@with_vllm
def test_adapters_are_merged_into_the_weights_it_samples_from(engine, other):
    add_lora(other, rank=4, alpha=64, targets={"q_proj", "v_proj", "up_proj", "down_proj"}, seed=0)
    for _, linear in linears(other):
        for b in linear.lora.b.values() if linear.lora else ():
            torch.nn.init.normal_(b, std=0.5, generator=torch.Generator().manual_seed(5))
    requests = make_requests(engine.tokenizer, samples=1, temperature=0.0)
    engine.update_weights(model_weights(other), weight_version=1)
    assert_same(generate(engine, requests), generate(own_engine(other, engine.tokenizer), requests))


@with_vllm
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up_keep_every_sequence(engine, level):
    requests = make_requests(engine.tokenizer, samples=1, temperature=0.0)
    expected = generate(engine, requests)
    for request in requests[1:]:
        engine.add_request(request)
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.sleep(level)
    engine.add_request(requests[0])
    with pytest.raises(RuntimeError, match="wake_up"):
        engine.step()
    engine.wake_up(["weights"])
    if level == 2:
        engine.update_weights(None, weight_version=4)
    engine.wake_up(["kv_cache"])
    outputs = sorted(outputs + finish(engine), key=lambda output: output.key.prompt)
    assert_same(outputs, expected)
    new = 4 if level == 2 else 0
    assert [o.generated.versions for o in outputs] == [[new] * 12] + [[0] * 4 + [new] * 8] * 3


@with_vllm
def test_stop_strings_and_stop_tokens_end_a_sample_and_keep_their_tokens(engine):
    tokenizer = engine.tokenizer
    request = make_requests(tokenizer, samples=1, max_tokens=20)[0]
    (free,) = generate(engine, [request])
    tokens = free.generated.token_ids
    text = tokenizer.decode(tokens)
    stop = text[6:9]
    end = text.index(stop) + 3

    def stopped(partial=None, **params):
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, **params)
        engine.add_request(Request("s", request.prompt_token_ids, sampling, request.keys, partial))
        return finish(engine)[0]

    cut = stopped(stop=("nothing", stop))
    assert (cut.generated.token_ids, cut.finish_reason) == (tokens[:end], "stop")
    cut = stopped(stop_token_ids=(tokens[4],))
    assert cut.generated.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    # A stop string of which an aborted sample had the beginning.
    engine.add_request(request)
    for _ in range(end - 1):
        engine.step()
    (partial,) = engine.abort()
    cut = stopped(partial.generated, stop=tuple(stop[:2] + last for last in map(chr, range(32, 127))))
    assert len(cut.generated.token_ids) == end
    assert cut.finish_reason == "stop"


@with_vllm
def test_the_token_that_ends_an_answer_is_kept_unless_it_is_to_be_ignored(engine, other):
    """A model whose likeliest token is always the end."""
    weights = dict(places(other).items())
    eos = engine.tokenizer.eos_token_id
    direction = torch.ones(128)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 0.01 + 0.1
    weights["model.embed_tokens.weight"][eos] = direction
    engine.update_weights(weights.items(), weight_version=1)
    (output,) = generate(engine, make_requests(engine.tokenizer, 1, temperature=0.0, ignore_eos=False)[:1])
    assert (output.generated.token_ids, output.finish_reason) == ([eos], "stop")
    (output,) = generate(engine, make_requests(engine.tokenizer, 1, temperature=0.0)[:1])
    assert (output.generated.token_ids, output.finish_reason) == ([eos] * 12, "length")


@with_vllm
def test_a_request_that_can_never_fit_is_refused_at_once(engine):
    with pytest.raises(ValueError, match="do not fit into 1024 positions"):
        engine.add_request(Request("r", [5] * 1000, SamplingParams(max_tokens=25), [key(0)]))
    with pytest.raises(ValueError, match="0 prompt tokens"):
        engine.add_request(Request("r", [], SamplingParams(max_tokens=7), [key(0)]))
    assert not engine.has_unfinished()


@with_vllm
def test_the_process_around_it_stays_as_it_was(engine):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert "gomp" not in os.environ.get("LD_PRELOAD", "")


@with_vllm
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_trains_on_what_vllm_samples(tmp_path, workers):
    """The old log-probs are the engine's: with any other weights than the trainer's, the ratio would not be 1."""
    out = tmp_path / "run"
    changes = [
        "rollout.backend=vllm",
        "steps=3",
        "model.tiny.warmup_steps=20",
        "algorithm.old_logprobs=engine",
        f"workers={workers}",
    ]
    command = [sys.executable, "-m", "jigsawrl", "run", str(RUN_FILE), *changes, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search("INFO|WARN|ERROR", done.stdout)
    assert "Traceback" not in done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["actor/ratio"] for row in rows] == pytest.approx([1.0] * 3, abs=1e-3)
    assert max(row["actor/approx_kl"] for row in rows) < 1e-5
    assert (out / "model" / "model.safetensors").is_file()


@with_vllm
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {}), ("qwen2", {"tie_word_embeddings": False}), ("qwen3", {"head_dim": 64}), ("mistral", {})],
)
def test_every_family_of_models_gives_the_tokens_of_our_engine(world, tmp_path, family, changes):
    """In a second engine beside the first."""
    tokenizer = world[0].tokenizer
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
    shape = {"hidden_size": 128, "vocab_size": 98, "architectures": [names[family]]}
    model = random_model(family, **{**shape, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    export_model(model, tmp_path, tmp_path / "hf")
    engine = VllmEngine(model, tmp_path / "hf", tokenizer, make_config())
    requests = make_requests(tokenizer, samples=1, temperature=0.0)
    assert_same(generate(engine, requests), generate(own_engine(model, tokenizer), requests))
    engine.close()
    assert len(generate(world[0], requests)) == len(requests)


@with_vllm
def test_a_model_that_vllm_cannot_run_is_refused(tmp_path):
    tokenizer = tiny(tmp_path / "tiny", seed=0)[2]
    for name, changes, reason in (
        ("heads", {"architectures": ["LlamaForCausalLM"]}, "this model's have 16"),
        ("unknown", {"hidden_size": 128, "architectures": ["Nothing"]}, "cannot run this model"),
    ):
        model = random_model(**changes)
        export_model(model, tmp_path / "tiny", tmp_path / name)
        with pytest.raises(JigsawError, match=reason) as refused:
            VllmEngine(model, tmp_path / name, tokenizer, make_config())
        assert len(str(refused.value)) < 300


@with_vllm
def test_a_temperature_that_vllm_does_not_take_is_refused(tmp_path):
    base, model, tokenizer = tiny(tmp_path, seed=0)
    for temperature in (0.005, 2.5):
        with pytest.raises(JigsawError, match=r"rollout\.temperature: .* set it from 0.01 to 2.0"):
            VllmEngine(model, base, tokenizer, make_config(temperature=temperature))


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    base, model, tokenizer = tiny(tmp_path, seed=0)
    with pytest.raises(JigsawError, match=r'pip install "jigsawrl\[vllm\]"'):
        VllmEngine(model, base, tokenizer, make_config())
