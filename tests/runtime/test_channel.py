"""The scheduler's end of a driver's line never waits for the driver."""

from __future__ import annotations

import os
import pickle
import struct
from multiprocessing import Pipe

import pytest

from jigsawrl.runtime.channel import MOST_MESSAGE, MOST_UNSENT, Broken, Channel
from jigsawrl.runtime.messages import Gather, Logged, Says, Stop


def test_messages_come_as_they_were_sent_however_large_they_are() -> None:
    ours, driver = Pipe()
    line = Channel(ours)
    assert line.receive() == []
    driver.send((Says("a"), Logged(b"x" * 100)))
    driver.send((Says("b"),))
    assert line.receive() == [Says("a"), Logged(b"x" * 100), Says("b")]
    line.send(Stop())
    gather = Gather((0,))
    line.send(gather)
    assert [driver.recv(), driver.recv()] == [Stop(), gather]


def test_a_driver_that_is_stopped_in_the_middle_of_a_message_stops_nobody() -> None:
    ours, driver = Pipe()
    line = Channel(ours)
    content = pickle.dumps((Says("whole"),))
    framed = struct.pack("!i", len(content)) + content
    for number in range(len(framed) - 1):
        os.write(driver.fileno(), framed[number : number + 1])
        assert line.receive() == []
    os.write(driver.fileno(), framed[-1:])
    assert line.receive() == [Says("whole")]


def test_a_driver_that_reads_nothing_holds_up_nobody_and_is_of_no_use_in_the_end() -> None:
    ours, driver = Pipe()
    line = Channel(ours)
    message = Gather(tuple(range(1000)))
    while line.unsent_bytes < MOST_UNSENT - 10_000:
        line.send(message)
    with pytest.raises(Broken, match="does not read"):
        [line.send(message) for _ in range(10)]
    assert line.unsent_bytes < MOST_UNSENT + 20_000
    driver.close()


def test_what_did_not_fit_goes_when_the_driver_reads() -> None:
    ours, driver = Pipe()
    line = Channel(ours)
    gather = Gather(tuple(range(50_000)))
    for _ in range(5):
        line.send(gather)
    assert line.unsent
    for _ in range(5):
        while not driver.poll(0):
            line.flush()
        while line.unsent:  # the rest of a large message comes only while it is read
            line.flush()
            os.read(driver.fileno(), 1 << 16)
    assert not line.unsent


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("!i", MOST_MESSAGE + 1),
        struct.pack("!iQ", -1, 1 << 40),
        struct.pack("!i", -2),
        struct.pack("!i", 3) + b"abc",
    ],
)
def test_nonsense_breaks_the_line_and_nothing_else(said: bytes) -> None:
    ours, driver = Pipe()
    line = Channel(ours)
    os.write(driver.fileno(), said)
    with pytest.raises(Broken):
        line.receive()


def test_last_words_are_read_before_the_end() -> None:
    ours, driver = Pipe()
    line = Channel(ours)
    driver.send((Says("goodbye"),))
    driver.close()
    assert line.receive() == [Says("goodbye")]
    with pytest.raises(EOFError):
        line.receive()
    with pytest.raises(OSError):  # noqa: PT011
        line.send(Stop())
