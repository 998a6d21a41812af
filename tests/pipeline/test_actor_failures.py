"""What an actor says when something goes wrong in it."""

from __future__ import annotations

from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.actor_process import answer_to


def test_the_first_line_says_what_went_wrong_and_the_others_where() -> None:
    def perform(method: str, args: tuple[Any, ...]) -> Any:
        raise MemoryError(f"no room for {method}\nsomething about allocators")

    kind, _, text = answer_to(perform, 7, "forward_backward", ())
    first, *others = text.splitlines()
    assert (kind, first) == ("failed", "MemoryError: no room for forward_backward")
    assert any("in perform" in line for line in others)


def test_a_refusal_is_its_message_alone() -> None:
    def perform(method: str, args: tuple[Any, ...]) -> Any:
        raise JigsawError("there is no such model; name another")

    assert answer_to(perform, 7, "setup", ()) == ("refused", 7, "there is no such model; name another")
