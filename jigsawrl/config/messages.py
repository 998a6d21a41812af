"""Turns validation errors into lines that name the key, the value, what is allowed, and a fix."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jigsawrl.config.schema import Model, all_settings, allowed, section_at, task_kinds
from jigsawrl.errors import JigsawError, printable, shown

MOST = 3
LONGEST_KEY = 200
MOST_EXPLAINED = 50


def joined(problems: Sequence[str]) -> str:
    """The first three problems, a line each, and how many there are besides."""
    more = len(problems) - MOST
    return "\n".join(problems[:MOST]) + (f" (and {more} more)" if more > 0 else "")


def explain(error: ValidationError, root: Model, data: Any) -> list[str]:
    """One line for each thing that is wrong in `data`; where that is a lot, the later ones are only names of keys."""
    details = error.errors(include_url=False)
    around = {detail["loc"][:length] for detail in details for length in range(len(detail["loc"]))}
    lines: list[str] = []
    for detail in details:
        if detail["loc"] in around:
            continue
        if len(lines) < MOST_EXPLAINED:
            lines += _explain(detail, root, data).split("\n")
        else:
            lines.append(".".join(map(str, detail["loc"])))
    return lines


def require(key: str, value: str, choices: Sequence[str]) -> None:
    """A JigsawError that names the nearest choice if the value is none of them."""
    if value not in choices:
        raise JigsawError(_wrong(key, value, f"one of {', '.join(choices)}"))


def shown_key(key: str) -> str:
    """A key, or an override, on one line of readable length."""
    key = printable(key).replace("\n", "\\n")
    return key if len(key) <= LONGEST_KEY else f"{key[: LONGEST_KEY - 3]}..."


def _explain(detail: ErrorDetails, root: Model, data: Any) -> str:
    kind, value = detail["type"], detail["input"]
    path = _path(detail["loc"], data)
    key = shown_key(".".join(path).replace(".[", "["))
    if kind == "refused":
        return f"{key}: {detail['msg']}" if key else detail["msg"]
    if kind == "invalid_key":
        return f"{key}: a key must be text; write it in quotes"
    if kind.startswith("union_tag"):
        choices = f"one of {', '.join(task_kinds(root))}"
        return (
            _wrong(f"{key}.kind", value["kind"], choices)
            if "kind" in value
            else _missing(f"{key}.kind", choices)
        )
    element = isinstance(detail["loc"][-1], int) if detail["loc"] else False
    names = [part for part in path[:-1] if not part.startswith("[")] + ([] if element else path[-1:])
    owner = section_at(root, names[:-1], data)
    if kind == "extra_forbidden":
        return f"{key}: no such setting; {_nearest(names, owner, root)}"
    field = owner.model_fields.get(names[-1]) if owner and names else None
    if field is None and kind == "model_type":  # an entry of a mapping of sections
        return _wrong(key, value, "a section (keys beneath it)")
    if field is None:  # inside of free-form parameters
        return (
            f"{key}: {shown(value)} is not allowed; it must be text, a number, true, false, null, or a list"
        )
    if kind == "missing" and not element:
        purpose = (field.description or "").rstrip(".")
        return _missing(key, f"{allowed(field)} ({purpose[:1].lower()}{purpose[1:]})")
    if kind == "missing":
        key, element = key.rpartition("[")[0], False
    default = field.get_default(call_default_factory=True)
    if field.default is None or element or not isinstance(default, str | int | float):
        return _wrong(key, value, allowed(field, element=element))
    return _wrong(key, value, allowed(field), default)


def _missing(key: str, choices: str) -> str:
    return f"{key}: missing; it must be {choices}"


def _wrong(key: str, value: Any, choices: str, default: Any = None) -> str:
    hint = ""
    if isinstance(value, str) and choices.startswith("one of "):
        near = difflib.get_close_matches(value, choices.removeprefix("one of ").split(", "), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    elif isinstance(value, str) and "number" in choices and _is_number(value):
        hint = "; write it without quotes"
    elif isinstance(value, int | float | datetime.date) and choices.startswith("text"):
        hint = "; write it in quotes"
    elif value is None and choices.startswith("a section ("):
        hint = "; remove the key for the defaults"
    elif default is not None:
        hint = f" (default {shown(default)})"
    return f"{key}: {shown(value)} is not allowed; it must be {choices}{hint}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _path(location: tuple[str | int, ...], data: Any) -> list[str]:
    """Where an error is in the run file: pydantic puts the task's kind between `task` and its key."""
    parts = [
        f"[{part}]" if isinstance(part, int) and depth else str(part) for depth, part in enumerate(location)
    ]
    task = data.get("task") if isinstance(data, dict) else None
    if parts[-1:] == ["[key]"]:  # the name of an entry is wrong, not what is in it
        del parts[-1]
    if parts[:1] == ["task"] and isinstance(task, dict) and parts[1:2] == [task.get("kind")]:
        del parts[1]
    return parts


def _nearest(names: Sequence[str], owner: Model | None, root: Model) -> str:
    """The setting that was probably meant: of the same section, else of the same name anywhere."""
    here = list(owner.model_fields) if owner else []
    if near := difflib.get_close_matches(names[-1], here, n=1):
        return f"did you mean {near[0]!r}?"
    elsewhere = [place for place in all_settings(root) if place.rpartition(".")[2] == names[-1]]
    if elsewhere and ".".join(names) not in elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    section = ".".join(names[:-1])
    return f"{section or 'a run file'} has {', '.join(here)}"
