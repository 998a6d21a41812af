"""Models are found by the names that people and workloads use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.graph.known_models import dense, model_named


@pytest.mark.parametrize(
    ("name", "billions", "layers"),
    [
        ("gsm8k_qwen3-0.6b", 0.596, 28),
        ("math_qwen3-4b-instruct", 4.02, 36),
        ("Qwen/Qwen3-4B-Instruct-2507", 4.02, 36),
        ("search_r1_llama3.1-8b_nprobe128", 8.03, 32),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.236, 16),
        ("Qwen2.5-Math-7B", 7.62, 28),
        ("Qwen2.5-0.5B", 0.494, 24),
        ("qwen3_32b", 32.76, 64),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1.78, 28),
        ("aime_deepseek-r1-distill-llama-8b", 8.03, 32),
        ("SmolLM2-135M-Instruct", 0.1345, 30),
        ("llama-3.3-70b", 70.55, 80),
    ],
)
def test_a_known_name_gives_its_numbers(name, billions, layers):
    model = model_named(name, "here")
    assert model.parameters == pytest.approx(billions * 1e9)
    assert model.layers == layers


def test_an_unknown_family_with_a_size_gets_a_plausible_shape():
    model = model_named("math_mystery-7b_v2", "here")
    assert model.parameters == 7e9
    assert 28 <= model.layers <= 40
    assert 2560 <= model.hidden <= 4608


@pytest.mark.parametrize("name", ["mystery", "qwen3", "run42", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_what_tells_no_dense_size_is_refused_with_advice(name):
    with pytest.raises(JigsawError, match="model"):
        model_named(name, "here")


@given(st.floats(0.05, 500))
def test_any_size_has_a_shape(billions):
    model = dense(billions, "any")
    assert model.parameters == pytest.approx(billions * 1e9)
    assert model.layers > 0
    assert model.hidden > 0
    assert model.kv_bytes_per_token > 0
