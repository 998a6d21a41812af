"""What holds for all tests: threads, time limits, and the fixtures that several of them use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from small_models import LetterTokenizer

from jigsawrl.model.cpu import make_bfloat16_safe
from jigsawrl.store.folders import STORE_FOLDER

torch.set_num_threads(1)
make_bfloat16_safe()  # before oneDNN is first used in this process
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture
def own_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that go on from the store of a run that was killed: any other run in the same place, as one of
    another test, clears such a store away."""
    memory = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="test-stores-", dir=memory if memory.is_dir() else None)
    monkeypatch.setenv(STORE_FOLDER, place)
    yield
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def tokenizer() -> LetterTokenizer:
    return LetterTokenizer()
