"""A device writes the store's pages and reads them, and lets go of them when their file goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from jigsawrl.store import pinned
from jigsawrl.store.staging import copy_into
from jigsawrl.store.store import Store

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


@pytest.fixture
def roomy(make_store: Callable[..., Store]) -> Iterator[Store]:
    yield make_store(256 << 20)
    assert not pinned._refused


def numbers(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "wide": torch.randn(1000, 3000, device="cuda", generator=generator),
        "narrow": torch.randn(77, 33, device="cuda", generator=generator).bfloat16().T,
        "one": torch.tensor(float(seed), device="cuda"),
        "counts": torch.tensor([seed, 2]),
        "none": torch.empty(0, 5, device="cuda"),
    }


def test_what_a_device_puts_again_and_again_comes_back_bit_for_bit(roomy: Store) -> None:
    for version in range(5):
        roomy.put("a", version, numbers(version), {"step": version}, again=True)
        entry = roomy.get("a")
        assert entry is not None
        assert (entry.version, entry.meta) == (version, {"step": version})
        assert entry.tensors["wide"].is_pinned()
        for name, tensor in numbers(version).items():
            assert torch.equal(entry.tensors[name], tensor.cpu()), name
            target = torch.full_like(tensor.contiguous(), 9)
            copy_into([(target, entry.tensors[name])])
            assert torch.equal(target, tensor), name
        del entry  # what is read is not written again
    assert len(pinned._known) == 2, "they take turns"


def test_what_this_process_reads_stays_as_it_is(roomy: Store) -> None:
    roomy.put("a", 0, numbers(0), again=True)
    reader = roomy.get("a")
    assert reader is not None
    for version in range(1, 4):
        roomy.put("a", version, numbers(version), again=True)
    assert torch.equal(reader.tensors["wide"], numbers(0)["wide"].cpu())


def test_pages_are_let_go_of_when_their_entry_is_dropped(roomy: Store) -> None:
    roomy.put("a", 0, numbers(0), again=True)
    assert len(pinned._known) == 1
    roomy.drop("a")
    assert not pinned._known


def test_where_pages_cannot_be_pinned_they_are_written_through_buffers(
    roomy: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pinned, "_refused", ["as if"])
        for version in range(3):
            roomy.put("a", version, numbers(version), again=True)
    entry = roomy.get("a")
    assert entry is not None
    assert not entry.tensors["wide"].is_pinned()
    assert all(torch.equal(entry.tensors[name], tensor.cpu()) for name, tensor in numbers(2).items())
