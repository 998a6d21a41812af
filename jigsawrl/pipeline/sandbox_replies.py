"""What a user-code process may write to its parent; anything else is user code's own, and not a reply.

User code can write into the pipe of its process: by accident, or to forge the reward of another answer. So every
message is checked whole, and must be one that is waited for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jigsawrl.pipeline.sandbox_host import MAX_ERROR, MAX_REPLY

if TYPE_CHECKING:
    from jigsawrl.pipeline.sandbox_child import Call

MAX_LINE = MAX_REPLY + 1024
"""Bytes of the longest reply, in which the value is all but a few."""
MAX_TEXT = 16 * MAX_ERROR
MAX_WIDTH = 1 << 16
MODES = ("serial", "threads", "loop")


class NotAReply(Exception):
    """The line is not one that this process could have to write now."""


def read_reply(line: bytes | bytearray, answerable: Mapping[str, Call], mode: str) -> dict[str, Any]:
    """The message that the line holds; NotAReply where it is none that is waited for.

    `answerable` are the calls that the process may answer now, by their ids. It has no mode until it is ready.
    """
    try:
        message = json.loads(line) if len(line) <= MAX_LINE else None
    except (ValueError, RecursionError):
        raise NotAReply from None
    if not isinstance(message, dict) or not _is_waited_for(message, answerable, mode):
        raise NotAReply
    return message


def _is_waited_for(message: dict[str, Any], answerable: Mapping[str, Call], mode: str) -> bool:
    match message:
        case {"ready": dict() as about, **more} if not more and not mode:
            return _is_description(about)
        case {"refused": str() as why, **more} if not more and not mode:
            return len(why) <= MAX_TEXT
        case {"id": str() as id, "seconds": float() as seconds, **outcome} if mode and id in answerable:
            return 0 <= seconds < math.inf and _is_outcome(outcome, answerable[id])
        case {"overdue": [_, *_] as calls, **more} if not more and mode in ("threads", "loop"):
            return _are_overdue(calls, answerable)
    return False


def _is_description(about: dict[str, Any]) -> bool:
    match about:
        case {
            "parameters": list() as parameters,
            "required": list() as required,
            "any_keyword": bool(),
            "mode": str() as mode,
            "width": int() as width,
            "uncontained": str() | None as uncontained,
        } if len(about) == 6:
            names = all(isinstance(name, str) for name in (*parameters, *required))
            return names and mode in MODES and 0 < width <= MAX_WIDTH and len(uncontained or "") <= MAX_TEXT
    return False


def _is_outcome(outcome: dict[str, Any], call: Call) -> bool:
    if not call.batch:
        return _is_result(outcome)
    match outcome:
        case {"batch": None, **more}:
            return not more
        case {"batch": list() as results, **more}:
            return not more and len(results) == len(call.batch) and all(map(_is_result, results))
    return False


def _is_result(result: Any) -> bool:
    match result:
        case {"value": _, **more}:
            return not more
        case {"error": str() as error, **more}:
            return not more and len(error) <= MAX_TEXT
    return False


def _are_overdue(calls: list[Any], answerable: Mapping[str, Call]) -> bool:
    ids: set[str] = set()
    for each in calls:
        match each:
            case [str() as id, bool()] if id in answerable and id not in ids:
                ids.add(id)
            case _:
                return False
    return True
