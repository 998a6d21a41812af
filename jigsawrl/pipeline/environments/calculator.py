"""The bundled environment: a sum to work out, and a calculator that takes its time.

    17*23=[17*23]       the model calls the tool; its turn ends at the ] (a stop string) or wherever it stops
    391                 the tool's result, after a real delay
    =391                the answer: the last number of a turn that holds no call

The reward is 1 for the right answer and 0 otherwise; a turn without a call is the last one.
"""

import ast
import asyncio
import operator
import random
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_CALL = re.compile(r"\[([^\[\]]*)")  # the ] may be missing: an engine leaves the stop string out of the text
_NUMBER = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_EXPRESSION = re.compile(r"[0-9+\-*/%(). ]{1,100}")

_OPERATORS: dict[type[ast.AST], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """One episode. Waiting is asynchronous, so the delays of many episodes overlap in one process."""

    def __init__(self, latency: float = 0.0, latency_jitter: float = 0.0) -> None:
        self._latency = latency
        self._latency_jitter = latency_jitter

    def reset(self, seed: int, expression: str) -> str:
        self._seed = seed
        self._answer = evaluate(expression)
        self._turn = 0
        return f"{expression}="

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._turn += 1
        call = _CALL.search(action)
        if call is None:
            return "", float(_last_number(action) == self._answer), True, {}
        await asyncio.sleep(self._delay(call[1]))
        return observation(calculate(call[1])), 0.0, False, {}

    def _delay(self, expression: str) -> float:
        """Keyed by the call and not by the clock: the same episode waits the same time whenever it is run."""
        return (
            self._latency
            + self._latency_jitter * random.Random(f"{self._seed}/{self._turn}/{expression}").random()
        )


def observation(result: str) -> str:
    """What the model reads after its call: the result on a line of its own."""
    return f"\n{result}\n"


def calculate(expression: str) -> str:
    """The tool: a number as text, or `error: ...`, whatever it is given."""
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def evaluate(expression: str) -> int | float:
    """The value of + - * / // % and parentheses over numbers. A hundred characters of these take no time."""
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError("not an expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("not an expression") from None
    return _evaluate(tree.body)


def _evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError("not an expression")


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
