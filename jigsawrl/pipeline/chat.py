"""From prompts and observations to tokens: the model's chat template, used without ever re-tokenising.

    prompt tokens | the model's tokens | turn tokens | the model's tokens | turn tokens | ...

What the model wrote stays the tokens it wrote. Only what stands between two of its turns is rendered and
tokenised, so a template that would rewrite earlier turns (drop their reasoning, trim them) changes nothing.
"""

from __future__ import annotations

import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from jigsawrl.errors import JigsawError

if TYPE_CHECKING:
    from jigsawrl.model.tokenizer import Tokenizer
    from jigsawrl.pipeline.tasks.base import Prompt

_ANSWER, _OBSERVATION = "jigsaw-answer-7f3a", "jigsaw-observation-7f3a"


class Dialogue:
    """The tokens around a model's turns.

    Where the template renders a conversation as a prefix of its continuation, prompt tokens + answer + end of
    turn + turn tokens are exactly the tokens of the template applied to the whole conversation. A model without
    a template gets plain text: messages joined by newlines, observations as they are. `date` is what a template
    writes as today's date; None: the clock's.
    """

    def __init__(self, tokenizer: Tokenizer, date: datetime.date | None = None) -> None:
        self._tokenizer = tokenizer
        self._date = date

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a task's prompt: text as it is, messages by the template."""
        if prompt.messages is not None:
            return self._open(prompt.messages)
        if prompt.text is None:
            raise JigsawError(f"prompt {prompt.index} of {prompt.data_source} has neither text nor messages")
        return self._plain(prompt.text)

    def first_tokens(self, observation: str, system_prompt: str | None) -> list[int]:
        """The tokens that open an episode: what an environment's `reset` gave, as the user's first message."""
        messages = [{"role": "user", "content": observation}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return self._open(messages)

    def turn_tokens(self, observation: str, last_token: int) -> list[int]:
        """The tokens between the model's answer, of which `last_token` is the last, and its next turn.

        The end of the answer's turn is among them only if the model has not written it itself.
        """
        if not self._tokenizer.has_chat_template:
            return self._tokenizer.encode(observation)
        tokens = self._tokenizer.encode(self._after_answer(observation))
        header = self._header
        ends_turn = last_token in header[:1] or last_token in self._tokenizer.eos_token_ids
        if ends_turn and last_token in header:
            return tokens[header.index(last_token) + 1 :]
        return tokens

    def _open(self, messages: list[dict[str, str]]) -> list[int]:
        if not messages:
            raise JigsawError("a prompt has an empty list of messages")
        if not self._tokenizer.has_chat_template:
            return self._plain("\n".join(message["content"] for message in messages))
        unfinished = messages[-1]["role"] == "assistant"
        text = self._tokenizer.render(messages, continue_last=unfinished, date=self._date)
        return self._tokenizer.encode(text)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.prefix_ids + self._tokenizer.encode(text)

    @cached_property
    def _header(self) -> list[int]:
        """The tokens that the template writes between the end of an answer and the observation."""
        return self._tokenizer.encode(self._after_answer(_OBSERVATION).partition(_OBSERVATION)[0])

    def _after_answer(self, observation: str) -> str:
        """What the template writes after an assistant's message when the user says `observation` next."""
        text = self._tokenizer.render(
            [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": _ANSWER},
                {"role": "user", "content": observation},
            ],
            date=self._date,
        )
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise JigsawError(
                "the model's chat template leaves out what the assistant said: no multi-turn tasks"
            )
        return after
