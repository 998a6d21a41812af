"""JSON and numbers from files that users give; whatever is wrong with them is one message that names the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.regular import MAX_JSON_BYTES, read_named


def json_in(path: Path, unlike: str, advice: str) -> Any:
    """What a JSON file holds; else a message that says what it is not, and gives advice."""
    try:
        text = read_named(path, MAX_JSON_BYTES).decode("utf-8-sig")
        if text.strip():
            return json.loads(text)
    except UnicodeDecodeError as error:
        raise JigsawError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise JigsawError(f"{path}, line {error.lineno}: is not JSON ({error.msg}); {advice}") from None
    except (RecursionError, ValueError):
        raise JigsawError(f"{path}: is no {unlike}; {advice}") from None
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    raise JigsawError(f"{path}: is empty; {advice}")


def bounded(value: Any, least: float, most: float, what: str, why: str) -> float:
    """The number, if it is one within these bounds; else the message says what is given, and why it cannot be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise JigsawError(f"{what} {shown(value)}{why}")
    return float(value)
