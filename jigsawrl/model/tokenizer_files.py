"""The files of a tokenizer: regular ones, of a bounded size, before any library opens them. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.regular import open_regular

MAX_BYTES = 256 << 20
"""Several times the largest vocabularies."""
MAX_TEMPLATE_BYTES = 1 << 20
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
