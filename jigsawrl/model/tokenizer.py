"""Text to tokens and back, as a model folder defines it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import has_surrogates, shortened, shown
from jigsawrl.model.chat_template import check_template
from jigsawrl.model.plain_tokenizer import GENERIC_CLASSES, plain_tokenizer
from jigsawrl.model.tokenizer_files import check_tokenizer_files
from jigsawrl.regular import read_json_object

_PROBE = "12+7=\nab c"


class UnusableText(JigsawError):
    """A text that this tokenizer, or the model beside it, cannot take."""


class Tokenizer:
    """A model folder's tokenizer.

    `encode` adds nothing to the text, and raises UnusableText where a token is not among those of the model, of which
    there are `model_vocabulary`. `prefix_ids` are the tokens that belong before a plain text (a BOS, or
    none); chat templates write their own. Each of `eos_token_ids` ends an answer; `eos_token_id` is the one to
    write where an answer must be ended.
    """

    def __init__(
        self, inner: Any, *, eos_token_ids: list[int], pad_token_id: int, model_vocabulary: int | None = None
    ) -> None:
        self.inner = inner
        self.model_vocabulary = model_vocabulary
        self.eos_token_id = eos_token_ids[0]
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.vocab_size: int = len(inner)
        self.has_chat_template: bool = inner.chat_template is not None
        self.prefix_ids = _prefix(inner)

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self.inner.encode(text, add_special_tokens=False, verbose=False)
        except BaseException as error:
            if has_surrogates(text):
                raise UnusableText("a text has half of a UTF-16 surrogate pair, which has no UTF-8") from None
            raise UnusableText(f"the model's tokenizer fails at a text ({_failure(error)})") from None
        if self.model_vocabulary is not None and max(ids, default=0) >= self.model_vocabulary:
            odd = next(token for token in ids if token >= self.model_vocabulary)
            raise UnusableText(
                f"a text has the token {odd} ({shown(self.decode([odd]))}), and the model knows only "
                f"{self.model_vocabulary} (vocab_size in its config.json)"
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def stream(self) -> Callable[[int], str]:
        """A function that takes tokens one by one and returns the text that each completes."""
        return StreamDecoder(self).push

    def render(
        self,
        messages: list[dict[str, str]],
        *,
        continue_last: bool = False,
        date: datetime.date | None = None,
    ) -> str:
        """The chat template applied, up to where the assistant goes on (with its last message, if asked).

        A template that writes today's date or the time gets midnight of `date`; None: what the clock says.
        """
        check_template(self._template())
        clock = {} if date is None else {"strftime_now": datetime.datetime(*date.timetuple()[:3]).strftime}

        try:
            text: str = self.inner.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continue_last,
                continue_final_message=continue_last,
                **clock,
            )
        except Exception as error:  # whatever the expressions of a template raise
            roles = shortened(", ".join(message["role"] for message in messages))
            said = shortened(" ".join(str(error).split())) or type(error).__name__
            raise JigsawError(
                f"the model's chat template refuses a conversation of {roles}: {said}"
            ) from None
        return text

    def _template(self) -> str:
        template = self.inner.chat_template
        return template if isinstance(template, str) else str(template.get("default", ""))


class StreamDecoder:
    """Decodes a growing sequence; the texts returned, joined, are the text of the whole.

    A token that ends inside a character gives nothing until a later one completes it; `finish` gives what is
    left. Tokens are decoded together with those before them, because some tokenizers treat the first token of
    a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """The rest, with a replacement character where the last token ends inside a character."""
        return self._advance(self._decode(self._context + self._pending)) if self._pending else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._context = self._pending
            self._context_text = self._decode(self._context)
            self._pending = []
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer in `folder`; nothing is downloaded, and code in the folder runs only if it is trusted."""
    if not folder.is_dir():
        raise JigsawError(f"model.path: {folder} is not a folder")
    check_tokenizer_files(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    if _own_code(settings) and not trust_remote_code:
        raise JigsawError(
            f"model.path: the tokenizer in {folder} brings its own code.\n"
            "If you trust that code, set model.trust_remote_code: true"
        )
    inner = _load(folder, settings, trust_remote_code)

    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") or config
    vocabulary = config.get("vocab_size")
    vocabulary = vocabulary if isinstance(vocabulary, int) else None
    eos = _ids(inner.eos_token_id) + _ids(generation.get("eos_token_id"))
    pad = _ids(inner.pad_token_id) + _ids(generation.get("pad_token_id"))
    for what, ids in (("eos_token_id", eos), ("pad_token_id", pad[:1])):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise JigsawError(
                    f"model.path: {folder} has {what} {shown(token)}; it must be a token's number"
                )
    if not isinstance(inner.chat_template, str | dict | None):
        raise JigsawError(
            f"model.path: {folder} has chat_template {shown(inner.chat_template)}; it must be text"
        )
    if not eos:
        raise JigsawError(
            f"model.path: nothing in {folder} says which token ends an answer; "
            "set eos_token in tokenizer_config.json"
        )
    if vocabulary is not None and (unknown := [token for token in eos if token >= vocabulary]):
        raise JigsawError(
            f"model.path: {folder} has eos_token_id {unknown[0]}, which is none of the {vocabulary} tokens of its "
            "model (vocab_size in config.json)"
        )
    try:
        return Tokenizer(inner, eos_token_ids=eos, pad_token_id=[*pad, *eos][0], model_vocabulary=vocabulary)
    except BaseException as error:
        raise _unreadable(folder, error) from error


def _load(folder: Path, settings: dict[str, Any], trust_remote_code: bool) -> Any:
    """AutoTokenizer's choice, unless it loses text that tokenizer.json, taken as it is, keeps.

    AutoTokenizer may rebuild the tokenizer by the model's type: a custom one beside a Qwen2 config would
    then lose its newlines.
    """
    as_it_is = (folder / "tokenizer.json").is_file()
    try:
        if as_it_is and (plain := plain_tokenizer(folder, settings)) is not None:
            return plain
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if as_it_is and not _own_code(settings) and settings.get("tokenizer_class") in GENERIC_CLASSES:
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        chosen = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        if as_it_is and not _keeps_text(chosen):
            generic = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            if _keeps_text(generic):
                return generic
    except BaseException as error:
        raise _unreadable(folder, error) from error
    return chosen


def _unreadable(folder: Path, error: BaseException) -> JigsawError:
    return JigsawError(f"model.path: {folder} has no tokenizer that can be read ({_failure(error)})")


def _failure(error: BaseException) -> str:
    """What a library said in one line; an interruption is raised again.

    The loaders raise plain `Exception` for some broken files, and panic at others, which is no Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    reason = shortened((str(error).strip().splitlines() or [""])[0])
    return f"{type(error).__name__}: {reason}"


def _own_code(settings: dict[str, Any]) -> Any:
    code = settings.get("auto_map")
    return code.get("AutoTokenizer") if isinstance(code, dict) else code


def _keeps_text(inner: Any) -> bool:
    ids = inner.encode(_PROBE, add_special_tokens=False)
    return bool(inner.decode(ids, clean_up_tokenization_spaces=False) == _PROBE)


def _prefix(inner: Any) -> list[int]:
    bare = inner.encode("a", add_special_tokens=False)
    dressed: list[int] = inner.encode("a")
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start]
    return []


def _ids(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, "model.path") if os.path.lexists(path) else {}
