"""The one exception whose message is meant for the user."""

from __future__ import annotations

import json
from typing import Any

LONGEST_LINE = 2000


class JigsawError(Exception):
    """Something the user can mend: one to three lines that say what is wrong and what to do. Exit code 2.

    Names and values of the user's are part of its message, so whatever a terminal would obey in it is shown escaped,
    and endless lines are cut.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__("\n".join(map(_cut, printable(str(message)).split("\n"))))


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 403]}...{line[-400:]}"


def printable(text: str) -> str:
    """A text with its line breaks, and everything else that is no visible character escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def shown(value: Any) -> str:
    """A value as one would write it in a run file, cut to a readable length."""
    if isinstance(value, float):
        text = {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}.get(repr(value), repr(value))
    elif isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # odd keys, or a list that holds itself
            text = _represented(value)
    text = printable(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _represented(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # thousands of digits
        return f"this {type(value).__name__}"
