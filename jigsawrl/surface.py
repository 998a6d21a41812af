"""How users give an option: as a flag of the `jigsaw` command, or as an argument of the Python API.

Messages that name an option come from deep inside, where nothing is known of who started the run: they name it with
`option`, and read as its user has to write it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_FLAGS = {"out": "--out", "resume": "--resume"}
_ARGUMENTS = {"out": "out=...", "resume": "resume=True"}
_in_python: ContextVar[bool] = ContextVar("in_python", default=False)


@contextmanager
def in_python() -> Iterator[None]:
    """Inside, options are arguments of the Python API."""
    token = _in_python.set(True)
    try:
        yield
    finally:
        _in_python.reset(token)


def option(name: Literal["out", "resume"]) -> str:
    return (_ARGUMENTS if _in_python.get() else _FLAGS)[name]
