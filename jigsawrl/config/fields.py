"""The kinds of value that settings have. None of them turns text or true into a number by itself."""

from __future__ import annotations

import datetime
import json
import re
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict
from pydantic_core import PydanticCustomError


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
    return params


def _target(text: str) -> str:
    if not re.fullmatch(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*", text):
        raise refuse(f"{text!r} must have the form 'file.py:name' or 'module:name'")
    return text


def _name(text: str) -> str:
    if len(text) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise refuse(f"{text!r} cannot name a folder; use letters, digits, '.', '_' and '-', 100 at most")
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


Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
NotNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Params = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
Name = Annotated[str, AfterValidator(_name)]
Target = Annotated[str, AfterValidator(_target)]
Date = Annotated[datetime.date, BeforeValidator(_date), Strict()]
Distinct = AfterValidator(_distinct)
