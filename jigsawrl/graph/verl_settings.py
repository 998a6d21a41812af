"""The settings of a verl run, as its console log tells them.

They are told twice: by the command line, which a shell under `set -x` prints, and by the resolved settings, which the
trainer prints with `pprint`:

    + python3 -m verl.trainer.main_ppo data.train_batch_size=256 actor_rollout_ref.rollout.n=4 ...
    {'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,
                                     'fsdp_config': {'param_offload': True}},
                           'rollout': {'n': 4}}, ...

A setting counts by its full key only (`actor_rollout_ref.rollout.n`): the reference, the reward model and validation
have settings of the same last names, and so have debug outputs. The resolved settings count more than the command
line, and the later of two more than the earlier.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from jigsawrl.graph.log_lines import LogLine

Name = Literal[
    "model", "samples", "tp", "memory_share", "prompts", "max_tokens", "gpus_per_node", "nodes", "hybrid"
]
KEYS: Mapping[Name, str] = {
    "model": "actor_rollout_ref.model.path",
    "samples": "actor_rollout_ref.rollout.n",
    "tp": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "memory_share": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "prompts": "data.train_batch_size",
    "max_tokens": "data.max_response_length",
    "gpus_per_node": "trainer.n_gpus_per_node",
    "nodes": "trainer.nnodes",
    "hybrid": "actor_rollout_ref.hybrid_engine",  # false where rollouts have devices of their own
}
"""What a setting is called here, and its full key."""
OFFLOADED = tuple(
    f"actor_rollout_ref.actor.{trainer}.param_offload"
    for trainer in ("fsdp_config", "megatron", "veomni", "torchtitan")
)
"""One for each kind of trainer. The reference has settings of its own."""
READ = (*KEYS.values(), *OFFLOADED)
"""Full keys of all settings that count."""
ASYNC = "async_training."
"""Settings that only asynchronous trainers have begin with this."""

MOST_BLOCK_LINES = 20_000
MOST_DEPTH = 64
MOST_COMMAND, MOST_COMMAND_LINES = 2**17, 1000
"""Characters and lines of a command."""
_ASYNC_MODULE = re.compile(r"fully_async|one_step_off|async_main|async_ppo")
_COMMAND = re.compile(r"(?!\s*#).*(?:python|torchrun|main_ppo)", re.DOTALL)
_OVERRIDE = re.compile(r"\s\+{0,2}(?:actor_rollout_ref|data|trainer|algorithm)\.[\w.]+=")
_OPENS = re.compile(r"\{\s*['\"]\w+['\"]\s*:")
_CONTINUES = re.compile(r"\s+(?:['\"\[{(<]|-?\.?\d|(?:True|False|None)\b)|\s*[\]})][\]}),\s]*$")
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[{}\[\](),:]|[^\s{}\[\](),:'\"]+")
_CLOSES = {"}": "{", "]": "[", ")": "("}


@dataclass(slots=True)
class Settings:
    """Gathers settings from the lines of a log."""

    asynchronous: str | None = None
    """What shows that they are those of a trainer that generates and trains at the same time."""
    _resolved: dict[str, str] = field(default_factory=dict)
    _command: dict[str, str] = field(default_factory=dict)
    _blocks: dict[str, _Block] = field(default_factory=dict)
    _unfinished: dict[str, list[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._resolved or self._command or self.asynchronous)

    def read(self, line: LogLine) -> None:
        """Takes what a line tells of the settings, if anything."""
        if self._read_command(line):
            return
        if _OPENS.match(line.text):
            self._blocks[line.source] = _Block()
        if block := self._blocks.get(line.source):
            for key, value in block.read(line.text):
                self._take(self._resolved, key, value)
            if block.over:
                del self._blocks[line.source]

    def close(self) -> None:
        """Whatever follows belongs to no settings that are still being printed."""
        self._blocks.clear()
        self._unfinished.clear()

    def text(self, name: Name) -> str | None:
        """As the log tells it, or None."""
        return self._told(KEYS[name])

    def whole(self, name: Name) -> int | None:
        """A whole number above 0, or None where the log does not tell one."""
        value = self.text(name) or ""
        return (int(value) or None) if value.isdecimal() and len(value) < 10 else None

    def share(self, name: Name) -> float | None:
        """A number above 0 and at most 1."""
        value = _value(self.text(name) or "")
        return value if isinstance(value, float) and 0 < value <= 1 else None

    def offloaded(self) -> bool:
        """Whether the actor's parameters are in host memory between uses."""
        return any((self._told(key) or "").lower() == "true" for key in OFFLOADED)

    def contradicts(self, other: Settings) -> bool:
        """Whether both tell a setting, and not the same."""
        told = ((self._told(key), other._told(key)) for key in READ)
        return any(
            mine is not None and theirs is not None and _value(mine) != _value(theirs)
            for mine, theirs in told
        )

    def _told(self, key: str) -> str | None:
        value = self._resolved.get(key, self._command.get(key))
        return None if value in (None, "", "None", "null") else value

    def _read_command(self, line: LogLine) -> bool:
        begun = self._unfinished.pop(line.source, [])
        if not begun and not _COMMAND.match(line.text):
            return False
        if line.text.endswith("\\") and len(begun) < MOST_COMMAND_LINES:
            self._unfinished[line.source] = [*begun, line.text[:-1]]
            return True
        text = " ".join(("", *begun, line.text))
        if len(text) > MOST_COMMAND or not _OVERRIDE.search(text):
            return False
        try:
            words = shlex.split(text)
        except ValueError:
            words = text.split()
        for before, word in zip(["", *words], words, strict=False):
            key, equals, value = word.partition("=")
            program = word if before == "-m" else "/".join(PurePosixPath(word).parts[-2:])
            if (before == "-m" or word.endswith(".py")) and _ASYNC_MODULE.search(program):
                self.asynchronous = f"it was started as {program}"
            elif equals and "$" not in value:
                self._take(self._command, key.lstrip("+"), value.strip("'\" "))
        return True

    def _take(self, settings: dict[str, str], key: str, value: str) -> None:
        if key in READ:
            settings[key] = value
        if key.startswith(ASYNC) or (key == KEYS["hybrid"] and value.lower() == "false"):
            self.asynchronous = f"its settings hold {key}={value[:40]}"


def _value(text: str) -> float | str:
    """However it is written: 0.60 is 0.6, and true is True."""
    try:
        return float(text)
    except ValueError:
        return text.lower()


@dataclass(slots=True)
class _Block:
    """Settings as `pprint` writes them: nested mappings whose keys stand in the column where their brace opened.

    Columns tell where a line belongs even where lines before it were lost or those of others came between.
    """

    over: bool = False
    _open: list[_Brace] = field(default_factory=list)
    _outermost: _Brace | None = None
    _lines: int = 0

    def read(self, text: str) -> Iterator[tuple[str, str]]:
        """Full keys and values of a line; none where the line is something else."""
        self._lines += 1
        self.over = self._lines > MOST_BLOCK_LINES or len(self._open) > MOST_DEPTH
        if self._outermost is not None and not _CONTINUES.match(text):
            self.over |= not self._open
            return
        tokens = list(_TOKEN.finditer(text))
        if len(tokens) > 1 and tokens[1][0] == ":":
            self._return_to(tokens[0].start())
        if self._outermost is not None and not self._open:
            self.over = True
            return
        for at, token in enumerate(tokens):
            word = token[0]
            if word in "{[(":
                self._open.append(_Brace(word, token.end()))
                self._outermost = self._outermost or self._open[0]
            elif word in _CLOSES:
                if self._open and self._open[-1].kind == _CLOSES[word]:
                    self._open.pop()
            elif self._open and self._open[-1].kind == "{":
                brace = self._open[-1]
                if word == ",":
                    brace.key = None
                elif word != ":" and at + 1 < len(tokens) and tokens[at + 1][0] == ":" and brace.key is None:
                    brace.key = word[1:-1] if word[0] in "'\"" else word
                elif word != ":" and (key := self._key()) is not None:
                    yield key, word[1:-1] if word[0] in "'\"" else word

    def _return_to(self, column: int) -> None:
        """A key in this column belongs to the mapping that opened there, or to one whose opening was lost."""
        for depth, brace in enumerate(self._open):
            if brace.kind == "{" and brace.column == column:
                del self._open[depth + 1 :]
                brace.key = None
                return
        if self._outermost is not None and column == self._outermost.column:
            self._open = [self._outermost]  # closed too early, as lines were lost
            self._outermost.key = None
        elif self._open and column > self._open[-1].column:
            self._open[-1].key = None
            self._open.append(_Brace("{", column))

    def _key(self) -> str | None:
        """Where all that is open leads; None inside a list, or below a key that holds a dot itself."""
        keys = [brace.key for brace in self._open if brace.kind == "{"]
        if len(keys) < len(self._open) or any(key is None or "." in key for key in keys):
            return None
        return ".".join(key for key in keys if key is not None)


@dataclass(slots=True)
class _Brace:
    kind: str
    column: int
    key: str | None = None
