"""Deterministic pipelines learn what they learned when it was recorded: `tests/fixtures/record.py results`.

Those that train alone and those that are multiplexed learn the same on any machine (`test_same_results`). Here the
same is asked of two versions of the code, so that a change which alters both alike is noticed too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import results

CLOSE = {"rel": 1e-4, "abs": 1e-6}
"""On another kind of machine floats are summed in another order. With the plainest kernels of torch, oneDNN and MKL
(ATEN_CPU_CAPABILITY=default, ONEDNN_MAX_CPU_ISA=SSE41, MKL_CBWR=COMPATIBLE) no token was another one in these mixes,
and no metric differed by more than 5e-7, or by more than a part of 1e-5."""


@pytest.mark.slow
@pytest.mark.parametrize("mix", results.MIXES)
def test_pipelines_learn_what_they_learned_when_it_was_recorded(mix: str, tmp_path: Path) -> None:
    """Bit by bit on the kind of machine where it was recorded."""
    recorded = results.recorded()
    found, expected = results.made(mix, tmp_path), recorded["results"][mix]
    if results.machine() == recorded["machine"]:
        assert found == expected
    assert found.keys() == expected.keys()
    for name, pipeline in found.items():
        for made, was in zip(pipeline["metrics"], expected[name]["metrics"], strict=True):
            assert made == pytest.approx(was, **CLOSE)
