"""Names and defaults of the algorithms."""

import subprocess
import sys
from typing import get_args

import pytest

from jigsawrl.pipeline.algorithms import Advantage, Aggregation, Loss, default_aggregation, default_clip


def test_the_names_are_there_without_torch() -> None:
    code = "import sys, jigsawrl.pipeline.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_loss_has_the_clip_of_its_paper() -> None:
    assert {loss: default_clip(loss) for loss in get_args(Loss)} == {
        "ppo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "gspo": (3e-4, 4e-4),
        "cispo": (1.0, 4.0),
    }


@pytest.mark.parametrize(
    ("loss", "advantage", "aggregation"),
    [
        ("ppo", "grpo", "sequence_mean"),
        ("ppo", "dr_grpo", "constant"),
        ("ppo", "rloo", "token_mean"),
        ("ppo", "reinforce_pp", "token_mean"),
        ("ppo", "reinforce_pp_baseline", "token_mean"),
        ("ppo", "gae", "token_mean"),
        ("dapo", "grpo", "token_mean"),
        ("cispo", "grpo", "token_mean"),
        ("cispo", "dr_grpo", "constant"),
        ("gspo", "grpo", "sequence_mean"),
        ("gspo", "dr_grpo", "sequence_mean"),
    ],
)
def test_aggregation_follows_the_papers(loss: Loss, advantage: Advantage, aggregation: Aggregation) -> None:
    assert default_aggregation(loss, advantage) == aggregation
