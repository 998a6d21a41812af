"""The kinds of value that settings have. None of them turns text or true into a number by itself."""

from __future__ import annotations

import datetime
import json
import re
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict
from pydantic_core import PydanticCustomError

from jigsawrl.errors import shown


class Settings(BaseModel):
    """One section of a run file: immutable, no unknown keys, one docstring line under each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def refuse(message: str) -> PydanticCustomError:
    """An error that is shown as `key: <message>`."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def _finite(params: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        json.dumps(params, allow_nan=False)
    except ValueError:
        raise refuse("must hold finite numbers only, no .nan and no .inf") from None
    except RecursionError:
        raise refuse("is nested too deeply") from None
    return params


def _target(text: str) -> str:
    _place(text)
    if not re.fullmatch(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*", text):
        raise refuse(f"{shown(text)} must have the form 'file.py:name' or 'module:name'")
    return text


def _name(text: str) -> str:
    if len(text) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise refuse(
            f"{shown(text)} cannot name a folder; use letters, digits, '.', '_' and '-', 100 at most"
        )
    return text


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise refuse(f"{json.dumps(values)} names something twice")
    return values


def _date(value: Any) -> Any:
    """YAML makes a date of 2026-11-19 without quotes; with quotes it is the same date."""
    if isinstance(value, str):
        with suppress(ValueError):
            return datetime.date.fromisoformat(value)
    return value


def at_most(limit: float) -> AfterValidator:
    """A bound far above anything real, so that no sum, time or size that follows from a setting gets out of hand."""

    def check(value: Any) -> Any:
        if value > limit:
            raise refuse(f"{shown(value)} is not allowed; it must be at most {limit}")
        return value

    return AfterValidator(check)


def at_least(limit: float) -> AfterValidator:
    """The same below."""

    def check(value: Any) -> Any:
        if value < limit:
            raise refuse(f"{shown(value)} is not allowed; it must be at least {limit}")
        return value

    return AfterValidator(check)


def _place(path: str) -> str:
    if re.search("[\0-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]", path):
        raise refuse(f"{shown(path)} is no path here; it holds a control character or is not Unicode")
    return path


MOST = 1_000_000_000
MOST_SECONDS = 1_000_000
"""Longer waits do not fit into the timeouts of the operating system."""

Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Field(strict=True, ge=0), at_most(MOST)]
Count = Annotated[int, Field(strict=True, ge=1), at_most(MOST)]
Priority = Annotated[int, Field(strict=True), at_most(MOST), at_least(-MOST)]
NotNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0), at_most(MOST)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0), at_most(MOST), at_least(1e-30)]
Seconds = Annotated[Positive, at_most(MOST_SECONDS)]
Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Place = Annotated[Text, AfterValidator(_place)]
"""A path of a file or a folder, or a name in its stead."""
Params = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
Name = Annotated[str, AfterValidator(_name)]
Target = Annotated[str, AfterValidator(_target)]
Date = Annotated[datetime.date, BeforeValidator(_date), Strict()]
Distinct = AfterValidator(_distinct)
