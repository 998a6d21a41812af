import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jigsawrl.store.store import Store


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Stores in shared memory that are gone after the test."""
    made: list[Store] = []

    def make(budget_bytes: int = 64 << 20) -> Store:
        made.append(Store.create(tmp_path / f"spill-{len(made)}", budget_bytes))
        return made[-1]

    yield make
    for store in made:
        store.destroy()
        shutil.rmtree(store.root, ignore_errors=True)  # a test may have put there what is no store's


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store()
