"""Where the command writes to, and what it answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED, INTERRUPTED = 1, 130
"""Exit codes."""


def answer(
    as_json: bool, document: dict[str, Any], parts: Iterable[RenderableType], out: Path | None, written: str
) -> None:
    """Prints the document as one JSON object, or what people read instead, and what was written where."""
    if as_json:
        print(json.dumps(document | ({"out": str(out.absolute())} if out else {})))
        return
    from rich.console import Console

    console = Console()
    for part in parts:
        console.print(part)
    if out is not None:
        console.print(f"written to {out}: {written}", highlight=False, markup=False)


@contextmanager
def stdout_on_stderr(wanted: bool) -> Iterator[None]:
    """Sends whatever is written to stdout meanwhile, by child processes too, to stderr."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
