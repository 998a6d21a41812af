"""A tokenizer.json as it is, read by `tokenizers` alone: importing `transformers` takes a second in each process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as RawTokenizer

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
PLAIN_SETTINGS = {
    "tokenizer_class",
    "eos_token",
    "pad_token",
    "clean_up_tokenization_spaces",
    "model_max_length",
}
"""Of tokenizer_config.json; any other may change what becomes of a text."""
MORE_SETTINGS = (
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates",
)


class PlainTokenizer:
    """That part of a tokenizer of `transformers` that is used here."""

    chat_template = None

    def __init__(self, raw: RawTokenizer, eos_token: str | None, pad_token: str | None) -> None:
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.eos_token_id = raw.token_to_id(eos_token) if eos_token else None
        self.pad_token_id = raw.token_to_id(pad_token) if pad_token else None

    def __len__(self) -> int:
        return self.raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> list[int]:
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: Literal[False]
    ) -> str:
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)


def plain_tokenizer(folder: Path, settings: dict[str, Any]) -> PlainTokenizer | None:
    """None where the settings, or files beside them, ask for more than tokenizer.json says."""
    generic = settings.get("tokenizer_class") in GENERIC_CLASSES and settings.keys() <= PLAIN_SETTINGS
    if not generic or any((folder / name).exists() for name in MORE_SETTINGS):
        return None
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    special = [token.content for token in raw.get_added_tokens_decoder().values() if token.special]
    ends = [settings.get(key) for key in ("eos_token", "pad_token")]
    return PlainTokenizer(raw, *ends) if all(end is None or end in special for end in ends) else None
