"""An actor's process between its pipeline and its engine."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from fake_device import FakeDevice
from small_models import LetterTokenizer, random_model

from jigsawrl.engine.cuda.burst import LONGEST, ROUND
from jigsawrl.engine.engine import Engine
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.pipeline import actor_process
from jigsawrl.pipeline.actor_process import receive, send, serve


def test_samples_are_handed_over_and_messages_are_heard_inside_of_a_burst_of_decode_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sample ends early in the first burst; somebody calls early in the second one."""
    engine = Engine(random_model(), LetterTokenizer(), num_blocks=200, block_size=4, deterministic=True)
    device = FakeDevice(engine.shared)
    actor: Any = SimpleNamespace(engine=engine)
    ours, theirs = Pipe()
    sent: list[tuple[str, list[int]]] = []
    launch = device.launch

    def calling(*given: Any) -> Any:
        if device.bursts == [LONGEST, 3]:
            send(theirs, (7, "who is there", ()))
        return launch(*given)

    def noting(pipe: Any, message: tuple[str, int | None, Any]) -> None:
        sent.append((message[0], list(device.bursts)))
        send(pipe, message)

    monkeypatch.setattr(device, "launch", calling)
    monkeypatch.setattr(actor_process, "send", noting)
    for number, length in enumerate((100, ROUND + 4)):
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        send(theirs, (None, Request(str(number), [1, 2], sampling, [SampleKey(7, "", 0, number, 0)]), ()))
    serving = threading.Thread(
        target=serve, args=(ours, lambda method, args: "it is me", lambda: actor, lambda: False, None)
    )
    serving.start()
    kinds = [receive(theirs) for _ in range(3)]
    theirs.close()
    serving.join(timeout=60)
    assert not serving.is_alive()
    assert [(kind, id) for kind, id, _ in kinds] == [("outputs", None), ("answer", 7), ("outputs", None)]
    assert [len(kinds[place][2][0].generated.token_ids) for place in (0, 2)] == [ROUND + 4, 100]
    assert sent[0] == ("outputs", [2 * ROUND]), "in the round after it had ended"
    assert sent[1] == ("answer", [LONGEST, ROUND])
