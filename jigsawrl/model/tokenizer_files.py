"""The files of a tokenizer: regular ones, of a bounded size, before any library opens them. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.regular import open_regular, read_regular

MAX_BYTES = 256 << 20
"""Several times the largest vocabularies."""
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKEN = (1 << 24) - 1
"""The largest id of a token. The tokenizer library makes room for every id below the largest one."""
WITH_TOKENS = ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json")
_LARGE_NUMBER = re.compile(rb"\d{8}")
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def check_tokenizer_files(folder: Path) -> None:
    """A JigsawError where a file that a tokenizer may be read from is a pipe, a device, a folder or too large."""
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for path in (*(folder / name for name in FILES), *templates):
        if not os.path.lexists(path):
            continue
        most = MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else MAX_BYTES
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise JigsawError(f"model.path: {path} cannot be read ({error.strerror})") from None
        if size > most:
            raise JigsawError(f"model.path: {path} has {size} bytes; at most {most} can be read")
    for name in WITH_TOKENS:
        _check_tokens(folder / name)


def _check_tokens(path: Path) -> None:
    """Few files have a number that is large enough to be looked at; only those are parsed."""
    if not path.exists():
        return
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise JigsawError(f"model.path: {path} cannot be read ({error.strerror})") from None
    if not _LARGE_NUMBER.search(content):
        return
    try:
        largest = max(_tokens(path.name, json.loads(content)), default=0)
    except (ValueError, RecursionError):  # the library says what is wrong with it
        return
    if largest > MAX_TOKEN:
        said = largest if largest < 1 << 64 else "above 2^64"
        raise JigsawError(
            f"model.path: {path} has a token whose id is {said}; at most {MAX_TOKEN} is possible"
        )


def _tokens(name: str, content: Any) -> Iterator[int]:
    """The ids that a tokenizer's file gives to tokens."""
    if not isinstance(content, dict):
        return
    if name == "tokenizer_config.json":
        added = content.get("added_tokens_decoder")
        yield from (int(each) for each in added if each.isdecimal()) if isinstance(added, dict) else ()
        return
    model = content.get("model")
    vocabulary = (
        content if name != "tokenizer.json" else model.get("vocab") if isinstance(model, dict) else None
    )
    if isinstance(vocabulary, dict):
        yield from (value for value in vocabulary.values() if type(value) is int)
    added = content.get("added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and type(each.get("id")) is int:
            yield each["id"]
