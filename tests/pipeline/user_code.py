"""User code of all kinds, good and bad, that the sandbox tests run in other processes.

It imports little at its top: it is loaded more than a hundred times.
"""

import collections
import ctypes
import os
import random
import re
import signal
import sys
import time
from typing import Any

CALLS = collections.Counter[str]()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def behave(what: str) -> Any:
    """Does what it is told, and returns it if it comes to that."""
    if what == "exit":
        os._exit(7)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "segfault":
        ctypes.string_at(0)
    elif what == "loop":
        while True:
            pass
    elif what == "sleep":
        time.sleep(1000)
    elif what == "regex":  # holds the interpreter all the time
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif what == "raise":
        deep(50, "a long story " * 1000)
    elif what == "unprintable":
        raise Unprintable
    elif what == "sys.exit":
        sys.exit("enough")
    elif what == "stop":
        raise StopIteration
    elif what == "recursion":
        behave_again = behave
        return behave_again("recursion")
    elif what == "not json":
        return {1, 2}
    elif what == "huge":
        return "x" * (9 << 20)
    elif what == "circle":
        circle: list[Any] = []
        circle.append(circle)
        return circle
    elif what == "garble":
        for fd in range(3, 20):
            try:
                os.write(fd, b"this is not for you\n")
            except OSError:
                continue
        time.sleep(1000)
    elif what == "close all":
        os.closerange(0, 100)
    elif what == "print":
        print("p" * 200_000)
        os.write(1, b"q" * 200_000)
        try:
            input()
        except EOFError:
            return "print"
    elif what == "nap":
        time.sleep(0.05)
    elif what == "siesta":
        time.sleep(0.2)
    elif what == "work":
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
    return what


def deep(levels: int, message: str) -> None:
    if levels:
        deep(levels - 1, message)
    raise ValueError(message)


async def behave_async(what: str) -> Any:
    import asyncio

    if what == "await forever":
        await asyncio.sleep(1000)
    elif what in ("nap", "siesta"):
        await asyncio.sleep(0.05 if what == "nap" else 0.2)
        return what
    await asyncio.sleep(0)
    return behave(what)


def greet(name: str, *, greeting: str = "hello") -> str:
    return f"{greeting} {name}"


def tired(what: str) -> str:
    """Ends its process at every fifth call in it, whatever the call: nobody's fault."""
    CALLS["tired"] += 1
    if CALLS["tired"] == 5:
        os._exit(1)
    return what


def iterate() -> list[str]:
    return list({f"word {n}" for n in range(50)})


def numpy_scalar() -> Any:
    import numpy

    return {"score": numpy.float32(0.5), "right": numpy.bool_(True), "all": numpy.arange(3)}


def alarmed() -> str:
    """Signals work in the main thread only."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    return "alarmed"


def announce(what: str) -> Any:
    print(os.getpid())
    return behave(what)


def spawn_and_hang(mark: str) -> None:
    import subprocess

    subprocess.Popen(["sh", "-c", "sleep 1000; true", mark])
    time.sleep(1000)


# Rewards


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    if solution_str.startswith("do "):
        return behave(solution_str.removeprefix("do "))
    if solution_str.startswith("return "):
        return eval(solution_str.removeprefix("return "))
    return float(solution_str == ground_truth)


async def compute_score_async(data_source: str, solution_str: str, ground_truth: str) -> Any:
    import asyncio

    await asyncio.sleep(0.01 * (len(solution_str) % 3))
    return compute_score(data_source, solution_str, ground_truth)


def explain(solution_str: str, **rest: Any) -> Any:
    """What it was called with."""
    return {"score": 1, "seen": rest, "length": len(solution_str), "flag": True, "nan": float("nan")}


def what_came(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, weight: float) -> Any:
    came = [data_source, solution_str, ground_truth, extra_info, weight]
    return 1.0 if repr(came) == solution_str else repr(came)


def by_group(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> Any:
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


async def by_group_async(prompts: Any, completions: Any, **columns: Any) -> Any:
    import asyncio

    await asyncio.sleep(0)
    return [None, float("nan"), True, 2][: len(completions)]


def by_chat(prompts: Any, completions: Any, difficulty: list[int]) -> Any:
    right = all(isinstance(prompt, list) and prompt[-1]["role"] == "user" for prompt in prompts)
    texts = [completion[0]["content"] for completion in completions]
    return [float(right and completion[0]["role"] == "assistant") + len(text) + hard
            for completion, text, hard in zip(completions, texts, difficulty, strict=True)]  # fmt: skip


def short_list(completions: Any) -> list[float]:
    return [1.0]


def neither(a: int, b: int) -> int:
    return a + b


# Environments


class Counter:
    """Counts to ten with the model; the text that it is given says what else it does."""

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def reset(self, seed: int, **options: Any) -> str:
        self.random = random.Random(seed)
        self.options = options
        return f"seed {seed} {options}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action.startswith("do "):
            behave(action.removeprefix("do "))
        else:
            self.total += int(action)
        return (
            f"{self.total} {self.random.random()}",
            float(self.total),
            self.total >= 10,
            {"pid": os.getpid()},
        )


class Gymnasium(Counter):
    """Five values, and the observation with an info."""

    def reset(self, seed: int, **options: Any) -> Any:
        return super().reset(seed, **options), {"more": 1}

    def step(self, action: str) -> Any:
        observation, reward, _, info = super().step(action)
        return observation, reward, False, self.total > 1, info


class Async:
    def __init__(self) -> None:
        self.actions: list[str] = []

    async def reset(self, seed: int) -> str:
        import asyncio

        await asyncio.sleep(0)
        return str(seed)

    async def step(self, action: str) -> tuple[str, float, bool, None]:
        await behave_async(action)
        self.actions.append(action)
        return " ".join(self.actions), 0.0, False, None


class Wrong:
    def reset(self, seed: int) -> Any:
        return seed

    def step(self, action: str) -> Any:
        return eval(action)


class Closing:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def reset(self, seed: int) -> str:
        self.seed = seed
        return ""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return behave(action), 0.0, False, {}

    def close(self) -> None:
        with open(os.path.join(self.folder, str(self.seed)), "w") as out:
            out.write("closed")


class Fragile:
    def __init__(self) -> None:
        raise RuntimeError("out of licences")

    def reset(self, seed: int) -> str:
        return ""

    def step(self, action: str) -> Any:
        return ""


class NoStep:
    def reset(self, seed: int) -> str:
        return ""
