from pathlib import Path

import torch

from jigsawrl.store.memory import is_released, reclaim, release
from jigsawrl.store.staging import copy_into
from jigsawrl.store.store import Store


def test_a_tensor_without_memory_is_the_same_tensor_and_so_are_its_views() -> None:
    tensor, expected = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    row = tensor[1]
    release([tensor])
    assert is_released(tensor)
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    release([tensor])
    reclaim([tensor])
    copy_into([(tensor, expected)])
    assert torch.equal(tensor, expected)
    assert torch.equal(row, expected[1])
    reclaim([tensor])
    assert torch.equal(tensor, expected)


def test_a_tensor_of_mapped_pages_lets_go_of_them_and_leaves_them_as_they_are(store: Store) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    store.put("a", 0, {"x": values})
    entry = store.get("a")
    assert entry is not None
    tensor = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    tensor.data = entry.tensors["x"]
    release([tensor])
    assert is_released(tensor)
    assert torch.equal(entry.tensors["x"], values)
    reclaim([tensor])
    assert (tensor.shape, tensor.dtype) == (values.shape, values.dtype)
    copy_into([(tensor, entry.tensors["x"])])
    assert torch.equal(tensor, values)


def test_a_version_is_read_without_a_copy(store: Store) -> None:
    """Two readers have the same pages of the same file."""
    store.put("a/weights", 1, {"x": torch.ones(1 << 20)})
    readers = [store.get("a/weights"), store.get("a/weights")]
    sums = [float(reader.tensors["x"].sum()) for reader in readers if reader is not None]
    assert sums == [float(1 << 20)] * 2
    assert mapped_bytes(store.root, "Rss") > 2 * (4 << 20)
    assert mapped_bytes(store.root, "Anonymous") == 0


def mapped_bytes(folder: Path, kind: str) -> int:
    """What this process has in its mappings of a folder's files."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if " " in name:
            inside = str(folder) in line
        elif inside and name == kind:
            found += int(value.split()[0]) * 1024
    return found
