"""Matrix products on CPUs whose fastest library torch does not choose by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import LetterTokenizer, random_model

from jigsawrl.engine.engine import Engine
from jigsawrl.engine.runner import tiled_linear
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.model import cpu

AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f avx512bw\n"
OTHERS = {
    "Intel": "vendor_id : GenuineIntel\nflags : avx512f\n",
    "AMD without AVX-512": "vendor_id : AuthenticAMD\nflags : fpu avx2\n",
    "Arm": "Features : fp asimd\n",
}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What this machine says of its processor."""
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    cpu.prefers_onednn.cache_clear()
    yield tmp_path / "cpuinfo"
    cpu.prefers_onednn.cache_clear()


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 4096), (64, 1024), (300, 700)])
@pytest.mark.parametrize("biased", [False, True])
def test_onednn_multiplies_as_torch_does(rows: int, width: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((rows, 384), (width, 384)))
    bias = torch.randn(width, generator=generator) if biased else None
    with torch.inference_mode():
        found = cpu.onednn_linear(x, torch.nn.Parameter(weight), bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_only_on_processors_of_amd_with_avx_512_does_onednn_multiply(told: Path, text: str) -> None:
    assert not cpu.prefers_onednn()
    told.write_text(text)
    cpu.prefers_onednn.cache_clear()
    assert not cpu.prefers_onednn()
    told.write_text(AMD)
    cpu.prefers_onednn.cache_clear()
    assert cpu.prefers_onednn() == torch.backends.mkldnn.is_available()


def test_an_engine_samples_the_same_with_either_library(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LARGE_PRODUCT", 1)
    model = random_model(tie_word_embeddings=False)
    request = Request(
        "r", [5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0), [SampleKey(1, "p", 0, 0, 0)]
    )
    found = []
    for text in ("", AMD):
        told.write_text(text)
        cpu.prefers_onednn.cache_clear()
        engine = Engine(model, LetterTokenizer(), num_blocks=20, block_size=4)
        assert engine.runner.linear is (cpu.onednn_linear if text else F.linear)
        found.append(engine.generate([request])[0].generated)
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-4)


def test_deterministic_products_are_those_of_every_processor(told: Path) -> None:
    told.write_text(AMD)
    engine = Engine(random_model(), LetterTokenizer(), num_blocks=20, block_size=4, deterministic=True)
    assert engine.runner.linear is tiled_linear
