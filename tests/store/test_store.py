import errno
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jigsawrl.errors import JigsawError
from jigsawrl.store import names
from jigsawrl.store import store as store_module
from jigsawrl.store.store import Entry, Store

PAGE = os.sysconf("SC_PAGE_SIZE")
MakeStore = Callable[..., Store]


def pages(count: int, fill: int = 1) -> dict[str, torch.Tensor]:
    """A tensor that takes this many pages together with the file's header."""
    return {"x": torch.full((count * PAGE - 1024,), fill, dtype=torch.uint8)}


def got(store: Store, name: str, version: int | None = None) -> Entry:
    entry = store.get(name, version)
    assert entry is not None
    return entry


def spilled(store: Store, tmp_path: Path) -> list[str]:
    return sorted(path.name.partition("@")[0] for path in tmp_path.glob("spill-*/*"))


def test_tensors_of_every_kind_come_back_as_values(store: Store) -> None:
    base, flat = torch.randn(6, 8), torch.arange(20.0)
    odd = {
        "base": base,
        "tied": base,
        "parameter": torch.nn.Parameter(base),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "overlapping": flat[5:15],
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "truth": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "three halves": torch.tensor([1, 2, 3], dtype=torch.float16),
        "bytes": torch.arange(255).to(torch.uint8),
        "large": torch.tensor([2**62 + 1]),
        "unsigned": torch.tensor([2**16 - 1], dtype=torch.uint16),
        "eighth": torch.tensor([1.5, -2]).to(torch.float8_e4m3fn),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
    }
    store.put("odd", 1, odd, {"loss": 0.25, "tags": ["a", None]})
    entry = got(store, "odd")
    assert (entry.name, entry.version, entry.meta) == ("odd", 1, {"loss": 0.25, "tags": ["a", None]})
    assert entry.tensors.keys() == odd.keys()
    for name, tensor in odd.items():
        back = entry.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.data_ptr() % back.element_size() == 0, name
        assert (
            back.flatten().view(torch.uint8).tolist()
            == tensor.detach().contiguous().flatten().view(torch.uint8).tolist()
        ), name


def test_what_is_mapped_is_aligned_as_torch_aligns_its_own(store: Store) -> None:
    store.put(
        "a", 0, {"scalar": torch.ones(1, dtype=torch.float64), "x": torch.ones(32), "y": torch.ones(4, 4)}
    )
    assert [got(store, "a").tensors[name].data_ptr() % 64 for name in ("x", "y")] == [0, 0]


def test_what_has_no_place_in_a_file_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"'x'.*complex64"):
        store.put("a", 0, {"x": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="sparse"):
        store.put("a", 0, {"x": torch.eye(2).to_sparse()})
    for name in ("", "/a", "a//b", "../a", "a+b", "a@1", "a" * 181):
        with pytest.raises(ValueError, match="cannot be an entry's name"):
            store.put(name, 0, {})
    with pytest.raises(ValueError, match="version -1"):
        store.put("a", -1, {})
    with pytest.raises(ValueError, match="at least one"):
        store.put("a", 0, {}, keep=0)
    assert store.usage() == store_module.Usage(0, 0, 0)


def test_the_longest_name_and_the_highest_version_fit(store: Store) -> None:
    name = "a" * names.MAX_NAME
    store.put(name, 2**63 - 1, {})
    assert store.names() == [name]
    assert store.versions(name) == [2**63 - 1]


def test_an_entry_is_a_safetensors_file(store: Store) -> None:
    store.put("weights", 3, {"w": torch.arange(5.0), "b": torch.ones(3, dtype=torch.bfloat16)})
    (path,) = store.root.glob("*.safetensors")
    loaded = load_file(path)
    assert torch.equal(loaded["w"], torch.arange(5.0))
    assert torch.equal(loaded["b"], torch.ones(3, dtype=torch.bfloat16))


def test_bytes_come_back(store: Store) -> None:
    for version, data in enumerate((b"", b"x", bytes(range(256)) * 100)):
        store.put_bytes("paused/7", version, data, {"length": len(data)})
        assert store.get_bytes("paused/7") == data
        assert got(store, "paused/7").meta == {"length": len(data)}
    assert store.get_bytes("nothing") is None


def test_the_newest_versions_are_kept(store: Store) -> None:
    for version in (1, 2, 10, 11):
        store.put("a/weights", version, {}, keep=2)
    store.put("a/optimizer/0", 5, {})
    store.put("ab", 5, {})
    assert store.versions("a/weights") == [10, 11]
    assert got(store, "a/weights").version == 11
    assert got(store, "a/weights", 10).version == 10
    assert store.get("a/weights", 2) is None
    assert store.names("a/") == ["a/optimizer/0", "a/weights"]
    store.put("a/weights", 3, {}, keep=2)
    assert store.versions("a/weights") == [10, 11]
    store.drop("a/weights", 11)
    assert got(store, "a/weights").version == 10
    store.drop("a/weights")
    store.drop("a/weights")
    assert store.get("a/weights") is None
    assert store.names() == ["a/optimizer/0", "ab"]


def test_publishing_a_version_again_replaces_it(store: Store) -> None:
    store.put("a", 1, {"x": torch.zeros(3)}, {"first": True})
    before = got(store, "a")
    store.put("a", 1, {"x": torch.ones(3)}, {"first": False})
    assert (got(store, "a").meta, store.usage().entries) == ({"first": False}, 1)
    assert before.tensors["x"].tolist() == [0, 0, 0]


def test_a_reader_keeps_what_it_has_mapped_and_changes_nobody_elses(store: Store) -> None:
    store.put("a", 1, {"x": torch.zeros(3)})
    mine, yours = got(store, "a"), got(store, "a")
    mine.tensors["x"].add_(1)
    store.put("a", 2, {"x": torch.ones(3)})
    store.destroy()
    assert (mine.tensors["x"].tolist(), yours.tensors["x"].tolist()) == ([1, 1, 1], [0, 0, 0])


def test_the_least_recently_used_is_spilled_and_comes_back_when_there_is_room(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store(4 * PAGE)
    for fill, name in enumerate("abcd"):
        store.put(name, 0, pages(1, fill))
    got(store, "a")
    store.put("e", 0, pages(2, 4))
    assert spilled(store, tmp_path) == ["b", "c"]
    assert store.usage().memory_bytes == 4 * PAGE
    assert got(store, "b").tensors["x"][0] == 1, "read from the disk, as there is no room"
    assert spilled(store, tmp_path) == ["b", "c"]
    store.drop("e")
    assert got(store, "b").tensors["x"][0] == 1
    assert got(store, "c").tensors["x"][0] == 2
    assert spilled(store, tmp_path) == []
    assert store.usage() == store_module.Usage(4 * PAGE, 0, 4)


def test_what_is_larger_than_the_budget_goes_to_the_disk_and_moves_nobody(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store(2 * PAGE)
    store.put("small", 0, pages(1))
    store.put("large", 0, pages(3, 7))
    assert spilled(store, tmp_path) == ["large"]
    assert torch.equal(got(store, "large").tensors["x"], pages(3, 7)["x"])
    store.put("large", 1, pages(2, 8))
    assert spilled(store, tmp_path) == ["small"], "the older version on the disk was dropped"


def test_a_version_that_is_superseded_while_it_is_spilled_stays_away(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(2 * PAGE)
    store.put("old", 0, pages(2))
    fsync = os.fsync

    def superseded(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        store.drop("old")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", superseded)
    store.put("new", 0, pages(1))
    assert (store.names(), spilled(store, tmp_path)) == (["new"], [])


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_a_full_disk_is_one_clear_error_and_loses_nothing(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = make_store(2 * PAGE)
    store.put("kept", 4, pages(2, 9))
    real = getattr(os, call)

    def full(target: int | Path, *arguments: object) -> object:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if "spill-0/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(target, *arguments)

    monkeypatch.setattr(os, call, full)
    for size in (1, 3):
        with pytest.raises(
            JigsawError, match=r"spill-0: No space left on device\nAll that it held is still there"
        ):
            store.put("new", 0, pages(size))
    monkeypatch.undo()
    assert (store.names(), spilled(store, tmp_path)) == (["kept"], [])
    assert store.usage().memory_bytes == 2 * PAGE
    assert torch.equal(got(store, "kept").tensors["x"], pages(2, 9)["x"])


def test_where_others_fill_the_shared_memory_entries_go_to_the_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(store.root)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    store.put("a", 0, pages(1, 5))
    assert spilled(store, tmp_path) == ["a"]
    assert got(store, "a").tensors["x"][0] == 5
    monkeypatch.undo()
    assert got(store, "a").tensors["x"][0] == 5
    assert (spilled(store, tmp_path), store.usage().memory_bytes) == ([], PAGE)


def test_the_number_of_entries_has_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_ENTRIES", 2)
    store.put("a", 0, {})
    store.put("b", 0, {})
    with pytest.raises(JigsawError, match="2 entries, which is its limit"):
        store.put("c", 0, {})


def test_a_handle_travels_and_threads_share_it(store: Store) -> None:
    other = pickle.loads(pickle.dumps(store))
    threads = [
        threading.Thread(target=lambda at=at: [other.put(f"t/{at}", v, {}) for v in range(20)])
        for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.versions(f"t/{at}") for at in range(4)] == [[19]] * 4


def test_a_destroyed_store_says_that_it_is_gone(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(PAGE)
    store.put("a", 0, pages(2))
    store.destroy()
    store.destroy()
    assert not store.root.exists()
    assert spilled(store, tmp_path) == []
    for call in (lambda: store.get("a"), lambda: store.put("a", 0, {}), store.usage):
        with pytest.raises(JigsawError, match="is gone"):
            call()
    with pytest.raises(JigsawError, match="there is no store"):
        Store.attach(store.root)
