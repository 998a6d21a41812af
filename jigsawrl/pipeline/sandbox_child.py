"""One user-code process as its parent sees it: lines to it, lines from it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jigsawrl import temporary
from jigsawrl.pipeline.sandbox_replies import MAX_LINE, NotAReply, read_reply

# Imported, so that its bytecode is cached, but not as a part of the package, which would be imported with it.
_START = (
    "import sys; sys.path.append({!r}); import sandbox_keeper; why = sandbox_keeper.keep({}); "
    "import sandbox_host; sys.path.pop(); sandbox_host.main(why)"
)
_FOLDER = str(Path(__file__).parent)
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a call that gave no result; the message is one short line."""

    kind: Literal["raised", "timeout", "died"]
    message: str


@dataclass(slots=True, eq=False)
class Instance:
    """An object that lives in some process; its history of calls is enough to make it again in another one."""

    id: int
    history: list[str] = field(default_factory=list)
    home: Child | None = None
    failure: Failure | None = None
    busy: bool = False
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """One call on its way, as JSON text already.

    A `batch` stands for many calls of a function, which are made one by one if anything goes wrong. A `drop` has
    no result that anybody waits for, and is never tried again.
    """

    id: str
    done: Callable[[Any], None]
    method: str | None = None
    args: str = "{}"
    instance: Instance | None = None
    batch: tuple[str, ...] = ()
    drop: bool = False
    timeout: float = 0.0
    started: float = 0.0

    @property
    def step(self) -> str:
        return f"[{json.dumps(self.method)},{self.args}]"

    def message(self, child: Child) -> str:
        head = f'{{"id":"{self.id}","timeout":{self.timeout}'
        if self.batch:
            return f'{head},"batch":[{",".join(self.batch)}]}}\n'
        if self.instance is None:
            return f'{head},"object":null,"history":null,"args":{self.args}}}\n'
        if self.drop:
            return f'{head},"drop":{self.instance.id}}}\n'
        history = "null" if self.instance.home is child else f"[{','.join(self.instance.history)}]"
        method = json.dumps(self.method)
        return (
            f'{head},"object":{self.instance.id},"history":{history},"method":{method},"args":{self.args}}}\n'
        )


class Child(asyncio.SubprocessProtocol):
    """Lives on the event loop that started it. `on_exit` comes once, after every line that the process wrote.

    It is a keeper to begin with (see `sandbox_keeper`), which ends with user code and all that user code has started.
    What it writes is believed only if it answers a call that it was sent, or says once that it is ready: user code
    can reach the pipe. A process that writes anything else is taken for dead.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        alone: bool,
        on_message: Callable[[Child, dict[str, Any]], None],
        on_exit: Callable[[Child, str], None],
    ) -> None:
        self.alone = alone
        self.mode = ""  # serial, threads or loop once it is ready
        self.width = 0
        self.served = 0
        self.in_flight: dict[str, Call] = {}
        self.waiting: deque[Call] = deque()  # calls of instances that live here
        self.instances: set[Instance] = set()
        self.started = time.monotonic()
        self.crowded = 0.0  # when there was last more than one call in flight
        self.gone = asyncio.get_running_loop().create_future()
        self._setup = setup
        self._on_message = on_message
        self._on_exit = on_exit
        self._transport: asyncio.SubprocessTransport | None = None
        self._outbox: list[str] = []
        self._partial = bytearray()
        self._killed = False

    async def start(self) -> None:
        """OSError where the machine has no process to give."""
        await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            sys.executable,
            "-P",
            "-c",
            _START.format(_FOLDER, os.getpid()),
            stderr=None,
            cwd=self._setup["folder"],
            start_new_session=True,
            # The same for every process: what a set of strings iterates over must not depend on who is asked.
            env={**temporary.environment(), "PYTHONHASHSEED": "0"},
        )

    @property
    def ready(self) -> bool:
        return self.width > 0

    def running(self) -> list[Call]:
        """The calls that user code may be in; a serial process takes them in the order they were sent."""
        calls = list(self.in_flight.values())
        return calls[:1] if self.mode == "serial" else calls

    def answerable(self) -> dict[str, Call]:
        """The calls that it may answer now, by their ids."""
        return {call.id: call for call in self.running()} if self.mode == "serial" else self.in_flight

    def send(self, call: Call) -> None:
        call.started = time.monotonic()
        if self.in_flight:
            self.crowded = call.started
        self.in_flight[call.id] = call
        self._outbox.append(call.message(self))

    def take(self, call: str) -> Call:
        """The call that was answered, which is no longer in flight."""
        taken = self.in_flight.pop(call)
        self.served += 1
        if self.in_flight:
            self.crowded = time.monotonic()
            if self.mode == "serial":
                next(iter(self.in_flight.values())).started = self.crowded
        return taken

    def had_company(self, call: Call) -> bool:
        return self.mode != "serial" and self.crowded >= call.started

    def excuse(self, seconds: float) -> None:
        """Counts this much of the time as not passed."""
        self.started += seconds
        self.crowded += seconds
        for call in self.in_flight.values():
            call.started += seconds

    def flush(self) -> None:
        if self._outbox and self._transport is not None:
            self._pipe(0).write("".join(self._outbox).encode())
            self._outbox.clear()

    def kill(self) -> None:
        """Ends the process and all that it has started; nothing of it is reported from now on, but `gone` will be
        set."""
        self._killed = True
        self._partial.clear()
        self._abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        if self._killed:
            self._abort()
        self._outbox.append(json.dumps(self._setup) + "\n")
        self.flush()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if self._killed:
            return
        *lines, rest = data.split(b"\n")
        for last in lines:
            line, self._partial = self._partial + last, bytearray()
            self._read(line)
        self._partial += rest
        if len(self._partial) > MAX_LINE:
            self._read(self._partial)

    def _read(self, line: bytearray) -> None:
        if self._killed:
            return
        try:
            message = read_reply(line, self.answerable(), self.mode)
        except NotAReply:
            self.kill()
            self._on_exit(self, "wrote into the pipe that is for its replies")
        else:
            self._on_message(self, message)

    def pipe_connection_lost(self, fd: int, error: Exception | None) -> None:
        if fd == 1 and self._transport is not None and self._transport.get_returncode() is None:
            self._abort()

    def process_exited(self) -> None:
        assert self._transport is not None
        code = self._transport.get_returncode()
        assert code is not None
        if not self._killed:
            self._read_rest()
        self._transport.close()
        self.gone.set_result(None)
        if not self._killed:
            self._on_exit(self, _ending(code))

    def _abort(self) -> None:
        if self._transport is not None and not self.gone.done():
            with contextlib.suppress(ProcessLookupError):  # it may have been faster
                if sys.platform == "linux":
                    os.kill(self._transport.get_pid(), signal.SIGTERM)
                    os.kill(self._transport.get_pid(), signal.SIGCONT)
                else:
                    os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _read_rest(self) -> None:
        """What it wrote before it ended; not until the pipe closes, which a grandchild may hold open."""
        pipe = self._pipe(1).get_extra_info("pipe")
        data = b"more"
        while data and not pipe.closed and not self._killed:
            try:
                data = os.read(pipe.fileno(), _READ)
            except BlockingIOError:
                return
            self.pipe_data_received(1, data)

    def _pipe(self, fd: int) -> Any:
        assert self._transport is not None
        return self._transport.get_pipe_transport(fd)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"
