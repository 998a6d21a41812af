"""After any puts, gets and drops the memory is within the budget and every kept entry reads back equal."""

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.store.store import Store

PAGE = os.sysconf("SC_PAGE_SIZE")
NAMES = st.sampled_from(["a", "a/b", "c"])
PUT = st.tuples(st.just("put"), NAMES, st.integers(0, 5), st.integers(0, 5 * PAGE), st.integers(1, 3))
GET = st.tuples(st.just("get"), NAMES, st.none() | st.integers(0, 5))
DROP = st.tuples(st.just("drop"), NAMES, st.none() | st.integers(0, 5))


@settings(max_examples=60)
@given(st.integers(0, 8 * PAGE), st.lists(PUT | PUT | GET | DROP, max_size=12))
def test_the_store_is_a_dictionary_within_a_budget(budget: int, steps: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder) / "spill", budget)
        try:
            model: dict[str, dict[int, torch.Tensor]] = {}
            for at, (verb, name, version, *how) in enumerate(steps):
                kept = model.setdefault(name, {})
                if verb == "put":
                    size, keep = how
                    kept[version] = torch.full((size,), at, dtype=torch.uint8)
                    store.put(name, version, {"x": kept[version]}, {"at": at}, keep)
                    for old in sorted(kept)[:-keep]:
                        del kept[old]
                elif verb == "get":
                    expected = max(kept, default=None) if version is None else version
                    entry = store.get(name, version)
                    assert (entry.version if entry else None) == (expected if expected in kept else None)
                else:
                    store.drop(name, version)
                    for old in list(kept) if version is None else [version]:
                        kept.pop(old, None)
                check(store, budget, model)
        finally:
            store.destroy()


def check(store: Store, budget: int, model: dict[str, dict[int, torch.Tensor]]) -> None:
    usage = store.usage()
    on_shelf = sum(path.stat().st_blocks * 512 for path in store.root.glob("*.safetensors"))
    assert on_shelf <= usage.memory_bytes <= budget
    assert usage.entries == sum(map(len, model.values()))
    assert store.names() == sorted(name for name, kept in model.items() if kept)
    for name, kept in model.items():
        assert store.versions(name) == sorted(kept)
        for version, tensor in kept.items():
            entry = store.get(name, version)
            assert entry is not None
            assert torch.equal(entry.tensors["x"], tensor)
