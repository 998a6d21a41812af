"""What the models of a run file say about themselves: which settings there are, and what each allows."""

from __future__ import annotations

import datetime
import types
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Model = type[BaseModel]
_UNIONS = (Union, types.UnionType)
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    datetime.date: "a date such as 2026-11-19",
}


def all_settings(model: Model, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings and sections, of all kinds of task."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        below = f"{prefix}{name}.NAME." if _by_name(field.annotation) else f"{prefix}{name}."
        for section in sections(_by_name(field.annotation) or field.annotation):
            yield from all_settings(section, below)


def section_at(root: Model, path: Sequence[str], data: Any) -> Model | None:
    """The model of the section at `path`; for the task, that of the kind that `data` has."""
    model = root
    names = iter(path)
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
        field = model.model_fields.get(name)
        found = sections(field.annotation) if field else []
        if field and (named := _by_name(field.annotation)):
            entry = next(names, None)
            data = data.get(entry) if isinstance(data, dict) else None
            found = [] if entry is None else sections(named)
        if len(found) > 1:
            kind = data.get("kind") if isinstance(data, dict) else None
            found = [each for each in found if each.model_fields["kind"].default == kind]
        if not found:
            return None
        model = found[0]
    return model


def sections(annotation: Any) -> list[Model]:
    """The models that a value of this type may have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, *_UNIONS):
        return [model for part in get_args(annotation) for model in sections(part)]
    return []


def _by_name(annotation: Any) -> Any:
    """The type of the entries of a mapping whose entries are sections; None for anything else."""
    entry = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return entry if sections(entry) else None


def task_kinds(root: Model) -> list[str]:
    """The values of `task.kind`."""
    return [model.model_fields["kind"].default for model in sections(root.model_fields["task"].annotation)]


def allowed(field: FieldInfo, *, element: bool = False) -> str:
    """What a setting may be, or an element of it where it is a list: `a number, above 0 and at most 1`."""
    annotation = get_args(field.annotation)[0] if element else field.annotation
    return _allowed(annotation, [] if element else field.metadata)


def _allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = chain.from_iterable(part.metadata for part in arguments[1:] if isinstance(part, FieldInfo))
        return _allowed(arguments[0], [*metadata, *inner])
    if len(sections(annotation)) > 1:
        return "a section with a kind, such as {kind: arithmetic}"
    if origin in _UNIONS:
        parts = list(dict.fromkeys(_allowed(a, metadata) for a in arguments if a is not type(None)))
        return ", or ".join(parts + ["null"] * (type(None) in arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is tuple:
        number = "" if arguments[-1] is ... else f" of {len(arguments)}"
        return f"a list{number}{_limits(metadata)}, each {_allowed(arguments[0], [])}"
    if sections(annotation):
        return "a section (keys beneath it)"
    return _WORDS.get(annotation, "a mapping (keys and values)") + _limits(metadata)


def _limits(metadata: Sequence[Any]) -> str:
    limits = []
    for bound in metadata:
        match bound:
            case Ge(ge=limit):
                limits.append(f"at least {limit}")
            case Gt(gt=limit):
                limits.append(f"above {limit}")
            case Le(le=limit):
                limits.append(f"at most {limit}")
            case Lt(lt=limit):
                limits.append(f"below {limit}")
            case MinLen():
                limits.append("not empty")
            case MaxLen(max_length=limit):
                limits.append(f"at most {limit} of them")
    return ", " + " and ".join(limits) if limits else ""
