"""Replies that user code forges, in part or without end: its process is taken for dead, soon and in little memory."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import hostile_code
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.pipeline.sandbox import Failure, Sandbox
from jigsawrl.pipeline.sandbox_child import Call
from jigsawrl.pipeline.sandbox_replies import MAX_LINE, NotAReply, read_reply

CODE = hostile_code.__file__
FORGED = Failure("died", "its process wrote into the pipe that is for its replies")
PATIENCE_S = 30.0
MEMORY = 150 << 20


def peak_above_now() -> int:
    """Bytes by which this process was larger than it is, since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    peak, now = (int(status.partition(field)[2].split()[0]) << 10 for field in ("VmHWM:", "VmRSS:"))
    return peak - now


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize(
    ("what", "threads"),
    [(what, 1) for what in (*hostile_code.LINES, *hostile_code.FOR_EVER, "10 MB without end")]
    + [(what, 4) for what in ("unknown id", "nothing overdue", "lines for ever")],
)
def test_a_forged_reply_is_a_death_and_the_next_call_is_answered(what: str, threads: int) -> None:
    sandbox = Sandbox(f"{CODE}:forge", {}, processes=1, timeout=1000, threads=threads)
    sandbox.check()
    forget_peak()
    assert sandbox.call(None, {"what": what}).result(PATIENCE_S) == FORGED
    assert peak_above_now() < MEMORY
    assert sandbox.call(None, {"what": "good"}).result(PATIENCE_S) == "good"
    sandbox.close()


def test_half_a_reply_is_ended_by_the_time_limit() -> None:
    sandbox = Sandbox(f"{CODE}:forge", {}, processes=1, timeout=0.5)
    found = [sandbox.call(None, {"what": what}).result(PATIENCE_S) for what in ("half a reply", "good")]
    assert found == [Failure("timeout", "it took longer than 0.5 s"), "good"]
    sandbox.close()


def test_a_daemon_that_forges_ends_the_process_that_left_it_behind() -> None:
    sandbox = Sandbox(f"{CODE}:forge_from_a_daemon", {}, processes=1, timeout=1000)
    assert sandbox.call(None, {"what": "lines for ever"}).result(PATIENCE_S) == FORGED
    assert sandbox.call(None, {"what": "good"}).result(PATIENCE_S) == "good"
    sandbox.close()


def test_a_copy_of_the_process_that_user_code_forgot_answers_nothing() -> None:
    sandbox = Sandbox(f"{CODE}:fork_and_return", {}, processes=1, timeout=1000)
    what = [f"{n}" for n in range(20)]
    calls = [sandbox.call(None, {"what": one}) for one in what]
    assert [call.result(PATIENCE_S) for call in calls] == what
    sandbox.close()


def test_results_too_large_for_one_reply_come_one_by_one() -> None:
    sandbox = Sandbox(f"{CODE}:large", {}, processes=1, timeout=1000)
    sandbox.check()
    sizes = [5 << 20, 1, 5 << 20]
    results = sandbox.map([{"size": size} for size in sizes]).result(PATIENCE_S)
    assert [len(result) for result in results] == sizes
    sandbox.close()


def test_time_in_which_the_driver_was_stopped_is_not_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is stopped, such as in a container that is frozen, the call could do nothing either."""
    sandbox = Sandbox(f"{CODE}:do", {}, processes=1, timeout=20)
    sandbox.check()
    call = sandbox.call(None, {"what": "spin"})
    while not any(child.in_flight for child in sandbox._pool._children):
        time.sleep(0.001)
    before, began = time.monotonic, time.monotonic()
    monkeypatch.setattr("jigsawrl.pipeline.sandbox_pool.time.monotonic", lambda: before() + 3600)
    assert call.result(PATIENCE_S) == "spin"
    assert time.monotonic() - began > 3600
    sandbox.close()


# What is read

CALL = Call("a1", lambda _: None)
BATCH = Call("b2", lambda _: None, batch=("{}", "{}"))
WAITING = {call.id: call for call in (CALL, BATCH)}
ABOUT = {
    "parameters": ["x"], "required": [], "any_keyword": False, "uncontained": None, "mode": "loop", "width": 3,
}  # fmt: skip
GOOD: list[tuple[Any, str]] = [
    ({"ready": ABOUT}, ""),
    ({"refused": "no"}, ""),
    ({"id": "a1", "seconds": 0.5, "value": {"score": math.nan}}, "serial"),
    ({"id": "a1", "seconds": 0.5, "error": "ValueError"}, "loop"),
    ({"id": "b2", "seconds": 0.5, "batch": [{"value": None}, {"error": "x"}]}, "serial"),
    ({"id": "b2", "seconds": 0.5, "batch": None}, "serial"),
    ({"overdue": [["a1", True], ["b2", False]]}, "threads"),
]
BAD: list[tuple[Any, str]] = [
    ({"ready": ABOUT}, "loop"),
    ({"ready": ABOUT | {"width": 0}}, ""),
    ({"ready": ABOUT | {"width": 10**9}}, ""),
    ({"ready": ABOUT | {"mode": "fast"}}, ""),
    ({"ready": ABOUT | {"parameters": [3]}}, ""),
    ({"ready": ABOUT | {"more": 1}}, ""),
    ({"refused": "x" * 10**6}, ""),
    ({"id": "a1", "seconds": 0.5, "value": 1}, ""),
    ({"id": "a2", "seconds": 0.5, "value": 1}, "loop"),
    ({"id": 1, "seconds": 0.5, "value": 1}, "loop"),
    ({"id": ["a1"], "seconds": 0.5, "value": 1}, "loop"),
    ({"id": "a1", "seconds": math.nan, "value": 1}, "loop"),
    ({"id": "a1", "seconds": math.inf, "value": 1}, "loop"),
    ({"id": "a1", "seconds": -1.0, "value": 1}, "loop"),
    ({"id": "a1", "seconds": "0.5", "value": 1}, "loop"),
    ({"id": "a1", "seconds": 0.5, "value": 1, "error": "x"}, "loop"),
    ({"id": "a1", "seconds": 0.5, "error": 1}, "loop"),
    ({"id": "a1", "seconds": 0.5, "batch": None}, "loop"),
    ({"id": "b2", "seconds": 0.5, "value": 1}, "loop"),
    ({"id": "b2", "seconds": 0.5, "batch": [{"value": 1}]}, "loop"),
    ({"id": "b2", "seconds": 0.5, "batch": [{"value": 1}, 2]}, "loop"),
    ({"overdue": []}, "threads"),
    ({"overdue": [["a1", True], ["a1", True]]}, "threads"),
    ({"overdue": [["a1", True]]}, "serial"),
    ({"overdue": [["a1", 1]]}, "threads"),
    ({"overdue": [["a3", True]]}, "threads"),
]


@pytest.mark.parametrize(("message", "mode"), GOOD)
def test_what_a_host_writes_is_read(message: Any, mode: str) -> None:
    assert str(read_reply(json.dumps(message).encode(), WAITING, mode)) == str(message)


@pytest.mark.parametrize(("message", "mode"), BAD)
def test_what_no_host_writes_now_is_not_a_reply(message: Any, mode: str) -> None:
    with pytest.raises(NotAReply):
        read_reply(json.dumps(message).encode(), WAITING, mode)


def test_a_line_longer_than_any_reply_is_none() -> None:
    line = json.dumps({"id": "a1", "seconds": 0.5, "value": "x" * MAX_LINE})
    with pytest.raises(NotAReply):
        read_reply(line.encode(), WAITING, "loop")


FIELDS = ["id", "seconds", "value", "error", "batch", "overdue", "ready", "refused", *ABOUT]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["a1", "b2", "loop", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6) | json_values,
    st.sampled_from(["", "serial", "threads", "loop"]),
)
def test_whatever_is_written_is_a_reply_that_is_waited_for_or_none(message: Any, mode: str) -> None:
    try:
        read = read_reply(json.dumps(message).encode(), WAITING, mode)
    except NotAReply:
        return
    assert set(read) & {"ready", "refused"} if not mode else read["overdue" if "overdue" in read else "id"]


@given(st.binary(max_size=100))
def test_bytes_that_are_no_reply_are_none(line: bytes) -> None:
    with pytest.raises(NotAReply):
        read_reply(line, WAITING, "loop")
