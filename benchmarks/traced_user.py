"""The user code of traced pipelines: a reward, and an environment whose tool takes its time."""

import asyncio
import random


def score(prompts, completions, **given):
    """Rewards that tell samples apart, so that there is a gradient."""
    return [float(len(text) % 2) for text in completions]


class Tool:
    """An episode of so many turns; after each but the last the tool takes from `latency` to twice that."""

    def __init__(self, turns, latency, prompt, **given):
        self.turns, self.latency, self.prompt = turns, latency, prompt

    def reset(self, seed):
        self.random = random.Random(seed)
        self.turn = 0
        return self.prompt

    async def step(self, action):
        self.turn += 1
        if self.turn == self.turns:
            return "", float(len(action) % 2), True, {}
        await asyncio.sleep(self.latency * (1 + self.random.random()))
        return self.prompt[:40], 0.0, False, {}
