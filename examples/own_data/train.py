"""Your data, your reward, a trained model. First: jigsaw run examples/arithmetic/run.yaml"""

from pathlib import Path

import jigsawrl

MORE = {"rollout": {"prompts_per_step": 48, "max_tokens": 4}, "trainer": {"lr": 5e-4}}


def reward(completions, answer, **columns):
    """TRL's signature: close to the right sum is worth something."""
    guesses = [int(text) if text.strip().isdecimal() else 1000 for text in completions]
    return [1 / (1 + abs(guess - int(right))) for guess, right in zip(guesses, answer, strict=True)]


if __name__ == "__main__":
    data = Path(__file__).parent / "sums.jsonl"
    result = jigsawrl.train(model="runs/arithmetic/model", task=data, reward=reward, steps=100, **MORE)
    print(result.model)
