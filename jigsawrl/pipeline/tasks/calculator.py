"""The bundled agentic task: sums that are hard to do in the head, and a calculator to do them with."""

from typing import Any

from jigsawrl.pipeline.environments.calculator import observation
from jigsawrl.pipeline.tasks.arithmetic import draw_problems
from jigsawrl.pipeline.tasks.base import ListedTask, Prompt
from jigsawrl.pipeline.tasks.environment import specify


def load(config: Any, seed: int) -> ListedTask:
    """`Prompt.extra` holds the options of the environment's `reset`: the problem of that prompt."""
    problems = draw_problems(config.max_number, config.operations, config.size, seed)
    prompts = [
        Prompt(index, None, None, str(problem.answer), "calculator", {"expression": problem.expression})
        for index, problem in enumerate(problems)
    ]
    params = {"latency": config.latency, "latency_jitter": config.latency_jitter}
    spec = specify(config, "jigsawrl.pipeline.environments.calculator:Calculator", params)
    return ListedTask(prompts, environment=spec, demonstrate=demonstrate)


def demonstrate(prompt: Prompt) -> str:
    """One call, what the tool says, and the answer. The `]` ends the first turn."""
    return f"[{prompt.extra['expression']}]{observation(prompt.ground_truth)}={prompt.ground_truth}"
