"""A task from the rows of a file, with the user's own reward function.

Rows are what verl and TRL users have: a prompt (text, or chat messages), a ground truth, and any other columns.
"""

import difflib
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shortened, shown
from jigsawrl.pipeline.tasks.base import JSON, ListedTask, Prompt, RewardSpec, Task
from jigsawrl.pipeline.tasks.rows import Rows, read_rows

IGNORED = ("tools", "chat_template_kwargs")
"""Columns that TRL renders prompts with."""
MAX_PROMPT_CHARACTERS = 4 << 20
"""More than the longest contexts hold; tokenizers take some hundred bytes of memory for a character."""
_VERL_GROUND_TRUTH = "reward_model.ground_truth"


def load(config: Any) -> ListedTask:
    """Prompts in the order of the file. `Prompt.extra` holds every column but the prompt, as rewards expect.

    There are no demonstrations: a ground truth need not be an answer that the reward accepts.
    """
    rows = read_rows(Path(config.path), config.format)
    first = rows.numbered[0][1]
    truth_column = config.ground_truth or _default_ground_truth(first)
    source_column = config.data_source or ("data_source" if "data_source" in first else None)
    prompts = []
    for index, (number, row) in enumerate(rows.numbered):
        source = rows.path.stem if source_column is None else _value(rows, number, row, source_column)
        if not isinstance(source, str):
            raise JigsawError(
                f"{rows.at(number)}, column {shown(source_column)}: must be text, not {_kind(source)}"
            )
        try:
            text, messages = _prompt(_value(rows, number, row, config.prompt), config.system_prompt)
        except ValueError as error:
            raise JigsawError(f"{rows.at(number)}, column {shown(config.prompt)}: {error}") from error
        truth = None if truth_column is None else _value(rows, number, row, truth_column)
        extra = {name: value for name, value in row.items() if name != config.prompt}
        prompts.append(Prompt(index, text, messages, truth, source, extra))
    reward = config.reward
    spec = RewardSpec(reward.path, reward.params, reward.timeout, reward.on_error, reward.processes)
    return ListedTask(prompts, reward=spec)


def ignored_columns(task: Task) -> str | None:
    """What to tell the user of columns that would make other prompts if they were honoured; None: there are none."""
    found = [name for name in IGNORED if any(task[index].extra.get(name) for index in range(len(task)))]
    if not found:
        return None
    what = f"the column {found[0]} is" if len(found) == 1 else f"the columns {' and '.join(found)} are"
    them = "it" if len(found) == 1 else "them"
    return f"{what} not used for the prompts, which are rendered without {them}; only the reward gets {them}"


def _default_ground_truth(row: dict[str, JSON]) -> str | None:
    """verl's column, else `ground_truth`, else `answer`, else none: a reward may do without."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return _VERL_GROUND_TRUTH
    return next((name for name in ("ground_truth", "answer") if name in row), None)


def _value(rows: Rows, number: int, row: dict[str, JSON], column: str) -> JSON:
    """The value of a column; a dot reaches into a column of objects, as in `reward_model.ground_truth`."""
    if column in row:
        return row[column]
    value: JSON = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            near = difflib.get_close_matches(column, row, n=1)
            hint = f"; did you mean {shown(near[0])}?" if near else ""
            raise JigsawError(
                f"{rows.at(number)}: there is no column {shown(column)}{hint}\nColumns: {names(row)}"
            )
        value = value[name]
    return value


def names(row: dict[str, JSON]) -> str:
    """The names of a row's columns, on one line."""
    return shortened(" ".join(", ".join(row).split())) or "none"


def _prompt(value: JSON, system_prompt: str | None) -> tuple[str | None, list[dict[str, str]] | None]:
    """(text, None) or (None, messages); ValueError says what is wrong with the value."""
    if not isinstance(value, str | list):
        raise ValueError(f"must be text or a list of chat messages, not {_kind(value)}")
    if not value:
        raise ValueError("the prompt is empty")
    texts = [value] if isinstance(value, str) else [m.get("content") for m in value if isinstance(m, dict)]
    length = sum(len(text) for text in texts if isinstance(text, str))
    if length > MAX_PROMPT_CHARACTERS:
        raise ValueError(
            f"the prompt has {length} characters, and at most {MAX_PROMPT_CHARACTERS} can be read"
        )
    if isinstance(value, str):
        if system_prompt is None:
            return value, None
        messages = [{"role": "user", "content": value}]
    else:
        messages = [_message(position, message) for position, message in enumerate(value)]
    if system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ValueError("has a system message already; leave task.system_prompt out")
        messages.insert(0, {"role": "system", "content": system_prompt})
    return None, messages


def _message(position: int, message: JSON) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"message {position} must be an object with role and content, not {_kind(message)}")
    for name in ("role", "content"):
        if message.get(name) is None:
            raise ValueError(f"message {position} has no {name!r}")
    for name, value in message.items():
        if not isinstance(value, str | None):
            raise ValueError(f"message {position}: {shown(name)} must be text, not {_kind(value)}")
    return {name: value for name, value in message.items() if value is not None}


def _kind(value: JSON) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
