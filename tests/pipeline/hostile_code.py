"""User code that starts processes, forges replies, and turns against those that run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

SLEEPS = "sleep 1000; true"


def start_processes(mark: str, then: str = "return") -> str:
    """Starts one process of each kind; their command lines hold the mark. `then` is what it does afterwards."""
    command = ["sh", "-c", SLEEPS, mark]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    os.kill(subprocess.Popen(command, start_new_session=True).pid, signal.SIGSTOP)
    daemon(command)
    return do(then)


STARTED = 4
"""Processes that it starts."""


def daemon(command: list[str]) -> None:
    """As daemons are started: forked twice, in a session of its own, without the pipes."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 100)
    os.execvp(command[0], command)


def do(what: str) -> str:
    if what == "hang":
        time.sleep(1000)
    elif what == "exit":
        os._exit(3)
    elif what == "stop itself":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    elif what == "stop parent":
        os.kill(os.getppid(), signal.SIGSTOP)
    elif what == "kill parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    elif what == "spin":
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            pass
    return what


def survey(driver: int) -> dict[str, Any]:
    """What can be seen and reached from here."""
    try:
        os.kill(driver, 0)
        reached = True
    except ProcessLookupError:
        reached = False
    return {
        "reached": reached,
        "seen": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
        "number": os.getpid(),
        "user": [os.getuid(), os.geteuid(), os.getgid()],
        "own": open(f"/proc/{os.getpid()}/cmdline").read() == open("/proc/self/cmdline").read(),
        "files": len(os.listdir("/proc/self/fd")) > 3,
        "capabilities": open("/proc/self/status").read().partition("CapEff:")[2].split()[0],
        "secret": os.access("/etc/shadow", os.R_OK),
    }


def many_ways() -> list[Any]:
    """Processes as user code commonly has them."""
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2) as pool:
        squares = list(pool.map(square, range(4)))
    shown = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
    return [squares, shown.stdout]


def square(x: int) -> int:
    return x * x


def fork_and_return(what: str) -> str:
    """Forgets to end the process that it has forked: two come back."""
    os.fork()
    return what


# Forged replies


def forge(what: str) -> str:
    """Writes into all that is open; then hangs, as what is behind it shall not come to its help."""
    if what == "good":
        return what
    while True:
        for fd in range(3, 20):
            try:
                written(fd, what)
            except OSError:
                continue
        if what not in FOR_EVER:
            time.sleep(1000)


def forge_from_a_daemon(what: str) -> str:
    if what == "good":
        return what
    if not os.fork():
        os.setsid()
        forge(what)
    time.sleep(1000)
    return what


LINES = {
    "unknown id": b'{"id":"0123456789abcdef","seconds":0.1,"value":1.0}',
    "number for id": b'{"id":0,"seconds":0.1,"value":1.0}',
    "no number": b'{"id":"0","seconds":NaN,"value":1.0}',
    "ready again": b'{"ready":{"parameters":[],"required":[],"any_keyword":true,"mode":"serial","width":1,'
    b'"uncontained":null}}',
    "refused later": b'{"refused":"no"}',
    "nothing overdue": b'{"overdue":[]}',
    "not an object": b"[1,2]",
    "nothing": b"",
    "deep": b"[" * 100_000,
    "not text": bytes(range(128, 256)),
    "huge": b'"' + b"x" * (10 << 20) + b'"',
}
FOR_EVER = ("lines for ever", "a line for ever")


def written(fd: int, what: str) -> None:
    if what == "half a reply":
        os.write(fd, b'{"id":"')
    elif what == "10 MB without end":
        data = memoryview(b"x" * (10 << 20))
        while data:
            data = data[os.write(fd, data) :]
    elif what == "lines for ever":
        os.write(fd, LINES["nothing overdue"] * 100 + b"\n")
    elif what == "a line for ever":
        os.write(fd, b"[1,2,3," * 10_000)
    else:
        data = memoryview(LINES[what] + b"\n")
        while data:
            data = data[os.write(fd, data) :]


def large(size: int) -> str:
    return "x" * size
