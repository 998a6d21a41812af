"""Every algorithm learns: sums that start at a third right and must end well."""

from __future__ import annotations

import statistics

import pytest
from small_runs import SMALL, SUMS, config, metrics, train

from jigsawrl.pipeline.warmup import prepare_base

KL = {"kl_coef": 0.01}
CASES = {
    "grpo, ppo": {},
    "dr_grpo, ppo": {"advantage": "dr_grpo"},
    "rloo, ppo": {"advantage": "rloo"},
    "reinforce_pp, ppo, kl k1 in reward": {
        "advantage": "reinforce_pp",
        "kl_in": "reward",
        "kl_estimator": "k1",
    }
    | KL,
    "reinforce_pp_baseline, ppo, kl k2": {"advantage": "reinforce_pp_baseline", "kl_estimator": "k2"} | KL,
    "gae, ppo, two epochs": {"advantage": "gae", "critic_lr": 2e-3, "epochs": 2},
    "grpo, dapo, dynamic sampling, overlong": {
        "loss": "dapo",
        "minibatches": 2,
        "dynamic_sampling": {"max_rounds": 2},
        "overlong": {"buffer": 2, "penalty": 0.5},
    },
    "grpo, gspo": {"loss": "gspo", "minibatches": 2},
    "grpo, cispo, entropy": {"loss": "cispo", "minibatches": 2, "entropy_coef": 1e-3},
    "grpo, ppo, the engine's log-probs truncated": {"old_logprobs": "engine", "tis_clip": 2.0},
    "grpo, ppo, kl k3, importance weights": {"tis_clip": 2.0} | KL,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that gets a third of the sums right."""
    out = tmp_path_factory.mktemp("learning")
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 200, "warmup_noise": 0.6}}
    return prepare_base(config(model=model), out, print)


def rewards_of_run(out, base, algorithm, *, lr=2e-3, **model):
    train(
        out,
        steps=20,
        model={"path": str(base), **model},
        task=SUMS,
        rollout={"prompts_per_step": 24, "samples": 8, "max_tokens": 4},
        algorithm=algorithm,
        trainer={"lr": lr},
        checkpoint={"every": 100},
    )
    return [row["reward/mean"] for row in metrics(out)]


@pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES)
def test_learns(algorithm, base, tmp_path):
    rewards = rewards_of_run(tmp_path / "run", base, algorithm)
    assert rewards[0] < 0.45
    assert statistics.mean(rewards[-4:]) > 0.85


def test_adapters_learn_too(base, tmp_path):
    rewards = rewards_of_run(tmp_path / "run", base, {}, lr=1e-2, lora={"rank": 16, "alpha": 32})
    assert rewards[0] < 0.45
    assert statistics.mean(rewards[-4:]) > 0.7


def test_without_a_learning_rate_nothing_is_learned(base, tmp_path):
    rewards = rewards_of_run(tmp_path / "run", base, {}, lr=0.0)
    assert max(rewards) < 0.5
