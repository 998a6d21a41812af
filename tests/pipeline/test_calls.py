"""Calls of actors: answers come in any order, and nobody is waited for while somebody else has something to say."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from jigsawrl.engine.types import Generated, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.actor_process import receive, send
from jigsawrl.pipeline.calls import MOST_QUEUED, ActorDied, Call, Inbox, ProcessHandle, answers, first_cause
from jigsawrl.pipeline.engines import Engines

SOON_S = 30.0


class Played:
    """Actors that the test plays: their handles, and their ends of the pipes."""

    def __init__(self, count: int) -> None:
        pipes = [Pipe() for _ in range(count)]
        self.inbox = Inbox()
        self.handles = [ProcessHandle(ours, None, rank, self.inbox) for rank, (ours, _) in enumerate(pipes)]
        self.actors = [theirs for _, theirs in pipes]

    def start(self) -> list[Call]:
        """Calls all of them; they have not read it yet."""
        return [handle.start("ready") for handle in self.handles]

    def answer(self, actor: int, value: Any, kind: str = "answer") -> None:
        """To the call that it reads."""
        id, *_ = receive(self.actors[actor])
        send(self.actors[actor], (kind, id, value))


def in_time(do: Callable[[], Any]) -> list[Any]:
    """What it returns; nothing where it waits for ever."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(do()), daemon=True)
    thread.start()
    thread.join(SOON_S)
    return done


def test_answers_are_in_the_order_of_the_calls_whoever_is_first() -> None:
    played = Played(3)
    calls = played.start()
    for rank in (2, 0, 1):
        send(played.actors[rank], ("outputs", None, []))
        played.answer(rank, rank * 10)
    assert answers(calls) == [0, 10, 20]


def test_a_call_is_done_while_another_worker_is_still_at_its_own() -> None:
    played = Played(2)
    slow, quick = played.start()
    played.answer(1, "done")
    assert answers([quick]) == ["done"]
    assert not slow.done
    played.answer(0, "done too")
    assert answers([slow]) == ["done too"]


def test_a_worker_has_several_calls_at_once_and_each_its_own_answer() -> None:
    played = Played(1)
    (handle,) = played.handles
    first, second = handle.start("values"), handle.start("logprobs")
    ids = [receive(played.actors[0])[0] for _ in range(2)]
    for id, value in ((ids[1], "logprobs"), (ids[0], "values")):
        send(played.actors[0], ("answer", id, value))
    assert answers([first, second]) == ["values", "logprobs"]


def test_late_answers_and_failures_to_somebody_elses_calls_are_dropped() -> None:
    """An actor that outlives a driver answers that one's calls, and the next driver's afterwards."""
    before, after = Played(1), Played(1)
    before.start()
    id, *_ = receive(before.actors[0])
    (call,) = after.start()
    for kind in ("answer", "failed", "refused", "answer"):
        send(after.actors[0], (kind, id, "of before"))
    after.answer(0, "of now")
    assert answers([call]) == ["of now"]
    assert after.handles[0].calls == {}


def test_the_first_failure_is_heard_though_others_never_answer() -> None:
    played = Played(2)
    calls = played.start()
    played.answer(1, "OSError: too many processes", "failed")
    with pytest.raises(RuntimeError, match="worker 1 failed: OSError: too many processes"):
        answers(calls)


def test_a_refusal_is_its_message_alone() -> None:
    played = Played(1)
    calls = played.start()
    played.answer(0, "there is no such model", "refused")
    with pytest.raises(JigsawError, match=r"^there is no such model$"):
        answers(calls)


def test_a_death_is_heard_though_only_another_worker_is_waited_for() -> None:
    played = Played(2)
    living, _ = played.start()
    played.actors[1].close()
    with pytest.raises(ActorDied, match="worker 1 died"):
        answers([living])


def test_the_last_words_of_a_dead_worker_are_heard_before_its_death() -> None:
    played = Played(1)
    calls = played.start()
    played.answer(0, "done")
    played.actors[0].close()
    assert answers(calls) == ["done"]
    with pytest.raises(ActorDied):
        played.inbox.hear()


def test_a_worker_that_nothing_was_asked_of_is_not_missed() -> None:
    """Pools have no actors where nothing of a pipeline runs, only the pipes that would lead there."""
    played = Played(2)
    played.actors[1].close()
    call = played.handles[0].start("ready")
    played.answer(0, "ready")
    assert answers([call]) == ["ready"]


def test_a_death_is_the_cause_of_the_connections_that_others_lose() -> None:
    lost, died = RuntimeError("worker 0 failed: connection closed by peer"), ActorDied("worker 1 died")
    assert first_cause([lost, died]) is died
    assert first_cause([lost]) is lost


def test_somebody_else_is_listened_to_while_workers_are_waited_for() -> None:
    played, (line, scheduler) = Played(1), Pipe()
    heard: list[str] = []
    calls = played.start()

    def listen() -> None:
        heard.append(line.recv())
        played.answer(0, "slept")

    scheduler.send("news")
    assert answers(calls, {line.fileno(): listen}) == ["slept"]
    assert heard == ["news"]


def request(prompt: int) -> Request:
    return Request(str(prompt), [1, 2], SamplingParams(max_tokens=3), [SampleKey(0, "a", 0, prompt, 0)])


def ended(asked: Request) -> SampleOutput:
    return SampleOutput(asked.request_id, asked.keys[0], Generated([5], [-0.5], [0]), "stop")


def test_samples_of_one_engine_come_while_another_is_stopped_in_the_middle_of_a_message() -> None:
    """An engine that is paused is stopped wherever it is."""
    played = Played(2)
    engines = Engines(played.handles, played.inbox)
    for prompt in range(2):
        engines.add_request(request(prompt))
    whole = pickle.dumps(("outputs", None, [ended(request(0))]))
    framed = struct.pack("!i", len(whole)) + whole
    os.write(played.actors[0].fileno(), framed[:9])
    send(played.actors[1], ("outputs", None, [ended(request(1))]))
    outputs: list[SampleOutput] = []
    assert in_time(lambda: [outputs.extend(engines.step()) for _ in range(2) if not outputs])
    assert outputs == [ended(request(1))]
    os.write(played.actors[0].fileno(), framed[9:])
    assert engines.step() == [ended(request(0))]
    engines.close()


def test_requests_to_an_engine_that_reads_nothing_keep_nobody_waiting() -> None:
    """They are there when it reads again."""
    played = Played(2)
    engines = Engines(played.handles, played.inbox)
    prompts = [Request(str(n), [7] * 50_000, SamplingParams(1), request(n).keys) for n in range(20)]
    assert in_time(lambda: [engines.add_request(each) for each in prompts])
    assert played.handles[0].stream.unsent
    send(played.actors[1], ("outputs", None, [ended(prompts[1])]))
    outputs: list[SampleOutput] = []
    while not outputs:
        outputs = engines.step()
    assert outputs == [ended(prompts[1])]

    def read() -> list[Any]:
        return [receive(played.actors[0])[1].request_id for _ in range(10)]

    reader = threading.Thread(target=lambda: send(played.actors[0], ("outputs", None, read() and [])))
    reader.start()
    deadline = time.monotonic() + SOON_S
    while reader.is_alive() and time.monotonic() < deadline:
        played.inbox.hear(0.01)
    assert not reader.is_alive()
    engines.close()


def test_samples_that_ended_while_something_was_sent_are_handed_over_at_once() -> None:
    played = Played(1)
    engines = Engines(played.handles, played.inbox)
    engines.add_request(request(0))
    send(played.actors[0], ("outputs", None, [ended(request(0))]))
    played.inbox.hear()
    assert in_time(engines.step) == [[ended(request(0))]]
    engines.close()


def test_an_actor_that_says_much_before_it_reads_and_its_pipeline_do_not_wait_for_each_other() -> None:
    played = Played(1)
    much, outputs = b"x" * (2 * MOST_QUEUED), [b"y" * (2 * MOST_QUEUED)]

    def play(pipe: Connection) -> None:
        send(pipe, ("outputs", None, outputs))  # nobody has read it when the call comes
        id, method, args = receive(pipe)
        send(pipe, ("answer", id, (method, args == (much,))))

    threading.Thread(target=play, args=(played.actors[0],), daemon=True).start()
    (handle,) = played.handles
    assert in_time(lambda: handle.call("load", much)) == [("load", True)]
    assert handle.take_early() == outputs  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 3 << 20])
def test_what_is_sent_is_what_a_connection_reads(size: int) -> None:
    played = Played(1)
    got: list[Any] = []

    def play(pipe: Connection) -> None:
        got.append(receive(pipe))
        send(pipe, ("answer", got[0][0], got[0][2][0]))

    threading.Thread(target=play, args=(played.actors[0],), daemon=True).start()
    assert in_time(lambda: played.handles[0].call("load", b"z" * size)) == [b"z" * size]
    assert got[0][1:] == ("load", (b"z" * size,))
