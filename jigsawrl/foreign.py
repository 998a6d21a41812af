"""Values that come from files, user code and environments, made fit for messages, logs and tokenizers."""

from __future__ import annotations

from typing import Any

SHOWN = 80
FLOAT32_MAX = 3.4028234663852886e38


def shown(value: Any) -> str:
    """The value in Python's notation on one line, cut to a readable length."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested without end, or an integer of thousands of digits
        text = f"a {type(value).__name__} that is too large to be shown"
    return shortened(text, SHOWN)


def shortened(text: str, length: int = 300) -> str:
    """The text on one line, or its beginning and three dots; what is no visible character is escaped."""
    text = text if len(text) <= length else text[: length - 3] + "..."
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def has_surrogates(text: str) -> bool:
    """Whether half of a UTF-16 pair stands alone in the text, which then has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def without_surrogates(text: str) -> str:
    """The text with U+FFFD, the replacement character, for every lone surrogate."""
    if not has_surrogates(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
