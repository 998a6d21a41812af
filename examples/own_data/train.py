"""Your data, your reward, a trained model. First: jigsaw run examples/arithmetic/run.yaml"""

from pathlib import Path

import jigsawrl

MORE = {
    "threads": 1,
    "rollout": {"prompts_per_step": 48, "samples": 16, "max_tokens": 4, "temperature": 2.5},
    "trainer": {"lr": 1e-3},
}
"""A model that has made up its mind must be made to try other answers: hence the temperature."""


def reward(completions, answer, **columns):
    """TRL's signature: close to the right sum is worth something."""
    guesses = [int(text) if text.strip().isdecimal() else 1000 for text in completions]
    return [1 / (1 + abs(guess - int(right))) for guess, right in zip(guesses, answer, strict=True)]


if __name__ == "__main__":
    data = Path(__file__).parent / "sums.jsonl"
    result = jigsawrl.train(model="runs/arithmetic/model", task=data, reward=reward, steps=100, **MORE)
    print(result.model)
