"""Talking to a run that is under way: one JSON object there, one back, over a socket that answers only its user.

The socket has no file: it is gone with its process, however that ends. It is served by threads of its own, which
bound what anybody can send, how long that may take, and how many may do it at a time.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from jigsawrl import durable
from jigsawrl.config.pipelines import holds_pipelines
from jigsawrl.config.started import RESOLVED
from jigsawrl.errors import JigsawError
from jigsawrl.regular import read_named
from jigsawrl.underway import is_under_way

ADDRESS = "control.json"
"""In the run folder: where the socket is, and whose."""
TIMEOUT_S = 20.0
"""Longest wait for an answer."""
START_S = 20.0
"""Longest wait for a run that is being set up to have a socket."""
MOST_BYTES = 1 << 20
"""Of a request, and of an answer."""
MOST_ADDRESS = 1 << 16
"""Bytes of the file that names the socket."""
REQUEST_S = 5.0
"""A connection that has not sent its whole request by then is closed."""
MOST_CONNECTIONS = 64
"""Of which no request has come yet; one more closes the oldest of them."""
MOST_AT_WORK = 16
"""Requests that are answered at a time; others hear that they should come back."""
LAST_ANSWERS_S = 2.0
"""Longest wait for answers that are under way when the run ends."""

Answer = dict[str, Any]


class Control:
    """The run's end. While it is open, requests are answered by `answer`, each in a thread of its own."""

    def __init__(self, out: Path, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.address = out / ADDRESS
        self.answer = answer
        self.incoming: list[socket.socket] = []
        """Connections whose request has not come in whole, the oldest first."""
        self.changing = threading.Lock()
        """Held while `incoming` changes."""
        self.at_work = threading.Semaphore(MOST_AT_WORK)
        """Whoever is answered has one of its places."""
        self.threads: set[threading.Thread] = set()
        """One for each connection."""
        name = f"jigsawrl-{os.getuid()}-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(f"\0{name}")
        self.socket.listen(128)
        self.thread = threading.Thread(target=self._serve, name="control", daemon=True)
        durable.replace(self.address, json.dumps({"socket": name, "pid": os.getpid()}).encode())
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Whoever has asked is still answered, within a bound."""
        self.address.unlink(missing_ok=True)
        self.socket.shutdown(socket.SHUT_RDWR)  # `accept` waits no longer
        self.thread.join()
        self.socket.close()
        with self.changing:
            while self.incoming:
                self._drop_oldest()
        until = time.monotonic() + LAST_ANSWERS_S
        for each in self.threads:
            each.join(max(0.0, until - time.monotonic()))

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:  # it was shut down
                    return
                time.sleep(0.05)  # too many open files, perhaps: others have to end first
                continue
            if _user_of(connection) != os.getuid():
                connection.close()
                continue
            with self.changing:
                if len(self.incoming) >= MOST_CONNECTIONS:
                    self._drop_oldest()
                self.incoming.append(connection)
            thread = threading.Thread(target=self._attend, args=(connection,), name="command", daemon=True)
            self.threads = {thread, *(each for each in self.threads if each.is_alive())}
            thread.start()

    def _drop_oldest(self) -> None:
        """Its thread waits for nothing more, and closes it."""
        with suppress(OSError):
            self.incoming.pop(0).shutdown(socket.SHUT_RDWR)

    def _attend(self, connection: socket.socket) -> None:
        """Answers what is asked there. One that was dropped, or says too little in its time, gets no answer."""
        with connection, suppress(OSError):
            try:
                content = _received(connection, REQUEST_S)
            finally:
                with self.changing:
                    is_waited_for = connection in self.incoming
                    if is_waited_for:
                        self.incoming.remove(connection)
            if is_waited_for:
                answer = json.dumps(self._answer(content)).encode()
                connection.settimeout(1.0)
                connection.sendall(answer)

    def _answer(self, content: bytes) -> Answer:
        if not self.at_work.acquire(blocking=False):
            return {"error": "has too many commands to answer; try again in a moment"}
        try:
            return self.answer(_parsed(content))
        except JigsawError as error:
            return {"error": str(error)}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return {"error": f"not understood: {error or type(error).__name__}"}
        except Exception as error:  # a command never ends a run, and is always answered
            return {"error": f"could not be carried out: {type(error).__name__}: {error}"}
        finally:
            self.at_work.release()


def _parsed(content: bytes) -> dict[str, Any]:
    if len(content) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    result = json.loads(content)
    if not isinstance(result, dict):
        raise ValueError("no object")
    return result


class Question:
    """A request to the run in a folder, on its way; it may be long until there is something to read.

    A run that is being set up may have no socket yet: it is waited for so many seconds (`patience`). A JigsawError
    where no run is under way.
    """

    def __init__(self, run: Path, patience: float = 0.0, **request: Any) -> None:
        self.run = run
        until = time.monotonic() + patience
        while not self._asked(request):
            waits = is_under_way(run) and _holds_pipelines(run) is not False
            if not waits or time.monotonic() > until:
                raise JigsawError(f"{run}: {why_silent(run, str(request.get('do')))}")
            time.sleep(0.1)

    def _asked(self, request: dict[str, Any]) -> bool:
        """Whether somebody was there to be asked."""
        try:
            where = json.loads(read_named(self.run / ADDRESS, MOST_ADDRESS))["socket"]
            if not isinstance(where, str):
                raise ValueError("it names no socket")
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise JigsawError(f"{self.run / ADDRESS}: cannot be read ({error})") from None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT_S)
        try:
            self.socket.connect(f"\0{where}")
        except OSError:  # its process is gone, or it is asked by too many
            self.socket.close()
            return False
        try:
            self.socket.sendall(json.dumps(request).encode())
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise self._no_answer(error) from None
        return True

    def fileno(self) -> int:
        return self.socket.fileno()

    def answer(self) -> Answer:
        """Waits for it; a JigsawError where there is none, or the run refuses."""
        try:
            answer = _parsed(_received(self.socket, TIMEOUT_S))
        except (OSError, ValueError, RecursionError) as error:
            raise self._no_answer(error) from None
        self.socket.close()
        if "error" in answer:
            raise JigsawError(f"{self.run}: {answer['error']}")
        return answer

    def _no_answer(self, error: Exception) -> JigsawError:
        self.socket.close()
        if is_under_way(self.run):
            said = (
                f"gave no answer ({error}); repeat the command: if it was carried out, nothing happens twice"
            )
        else:
            said = f"ended before it answered ({error}); repeat the command when it goes on with --resume"
        return JigsawError(f"{self.run}: {said}")


def why_silent(run: Path, do: str) -> str:
    """Why a folder has nobody who could do this, and what its user can do instead."""
    several = _holds_pipelines(run)
    if (run / ADDRESS).exists() and not is_under_way(run):
        return "was killed; nothing to talk to. It goes on with --resume"
    if several is None and is_under_way(run) and not (run / RESOLVED).exists():
        return "is still being set up; try again in a moment"
    if several is None:
        return "is neither a run of several pipelines nor a cluster; nothing to talk to"
    if _holds_pipelines(run.absolute().parent):
        whole = run.parent if run.name else run.absolute().parent
        return f"is one pipeline of a run; name the folder of the run: {whole}"
    if not is_under_way(run):
        return "has ended; nothing to talk to"
    if several:
        return "is still being set up; try again in a moment"
    return (
        f"{_NOT_WITH_ONE.get(do, _STOP)}\n(a run whose file has `pipelines` can be told more while it runs)"
    )


_STOP = (
    "Ctrl-C where it was started ends it after its step, and 'jigsaw run FILE --resume' goes on from there"
)
_NOT_WITH_ONE = {
    "pause": f"has one pipeline and cannot be paused; {_STOP}",
    "resume": "has one pipeline, which is under way and not paused",
    "cancel": f"has one pipeline and cannot be cancelled from here; {_STOP}",
    "submit": "has one pipeline and takes no other; start a run of its own for what you submit",
}


def _holds_pipelines(run: Path) -> bool | None:
    """None where the folder holds no run."""
    try:
        return holds_pipelines(run / RESOLVED)
    except JigsawError:
        return None


def ask(run: Path, **request: Any) -> Answer:
    """Sends a request to the run in this folder; a JigsawError where none is under way, or it refuses."""
    return Question(run, START_S, **request).answer()


def _user_of(connection: socket.socket) -> int:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", content)[1])


def _received(connection: socket.socket, limit_s: float) -> bytes:
    """All that comes until the other end has said its last, or what is more than may come; an OSError where neither
    is there in time."""
    until, content = time.monotonic() + limit_s, b""
    while len(content) <= MOST_BYTES:
        if (left_s := until - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        piece = connection.recv(65536)
        if not piece:
            break
        content += piece
    return content
