"""What holds for all tests: threads, time limits, and the fixtures that several of them use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from small_models import LetterTokenizer

from jigsawrl.model.cpu import make_bfloat16_safe

torch.set_num_threads(1)
make_bfloat16_safe()  # before oneDNN is first used in this process
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture
def tokenizer() -> LetterTokenizer:
    return LetterTokenizer()
