"""Talking to a run that is under way: one JSON object there, one back, over a socket that answers only its user.

The socket has no file: it is gone with its process, however that ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from jigsawrl import durable
from jigsawrl.config.pipelines import holds_pipelines
from jigsawrl.config.started import RESOLVED
from jigsawrl.errors import JigsawError
from jigsawrl.underway import is_under_way

ADDRESS = "control.json"
"""In the run folder: where the socket is, and whose."""
TIMEOUT_S = 10.0
MOST_BYTES = 1 << 20

Answer = dict[str, Any]


class Control:
    """The run's end."""

    def __init__(self, out: Path) -> None:
        self.address = out / ADDRESS
        name = f"jigsawrl-{os.getuid()}-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(f"\0{name}")
        self.socket.listen(8)
        self.socket.setblocking(False)
        durable.replace(self.address, json.dumps({"socket": name, "pid": os.getpid()}).encode())

    def fileno(self) -> int:
        return self.socket.fileno()

    def serve(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        """Answers one request. Whoever asks too slowly, or nonsense, is left alone."""
        with suppress(OSError):
            connection, _ = self.socket.accept()
            with closing(connection):
                if _user_of(connection) != os.getuid():
                    return
                connection.settimeout(1.0)
                try:
                    result = answer(_receive(connection))
                except JigsawError as error:
                    result = {"error": str(error)}
                except (ValueError, KeyError, TypeError) as error:
                    result = {"error": f"not understood: {error}"}
                connection.sendall(json.dumps(result).encode())

    def close(self) -> None:
        self.socket.close()
        self.address.unlink(missing_ok=True)


class Question:
    """A request to the run in a folder, on its way; it may be long until there is something to read.

    A JigsawError where no run is under way.
    """

    def __init__(self, run: Path, **request: Any) -> None:
        self.run = run
        try:
            where = json.loads((run / ADDRESS).read_text())["socket"]
        except FileNotFoundError:
            raise JigsawError(f"{run}: {why_silent(run, str(request.get('do')))}") from None
        except (OSError, ValueError, KeyError) as error:
            raise JigsawError(f"{run / ADDRESS}: cannot be read ({error})") from None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT_S)
        try:
            self.socket.connect(f"\0{where}")
            self.socket.sendall(json.dumps(request).encode())
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise self._no_answer(error) from None

    def fileno(self) -> int:
        return self.socket.fileno()

    def answer(self) -> Answer:
        """Waits for it; a JigsawError where there is none, or the run refuses."""
        try:
            answer = _receive(self.socket)
        except (OSError, ValueError) as error:
            raise self._no_answer(error) from None
        self.socket.close()
        if "error" in answer:
            raise JigsawError(f"{self.run}: {answer['error']}")
        return answer

    def _no_answer(self, error: Exception) -> JigsawError:
        self.socket.close()
        if is_under_way(self.run):
            return JigsawError(f"{self.run}: does not answer yet ({error}); try again in a moment")
        said = f"does not answer ({error}); has it been killed? It goes on with --resume"
        return JigsawError(f"{self.run}: {said}")


def why_silent(run: Path, do: str) -> str:
    """Why a folder has nobody who could do this, and what its user can do instead."""
    several = _holds_pipelines(run)
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
    return Question(run, **request).answer()


def _user_of(connection: socket.socket) -> int:
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", content)[1])


def _receive(connection: socket.socket) -> dict[str, Any]:
    content = b""
    while piece := connection.recv(65536):
        content += piece
        if len(content) > MOST_BYTES:
            raise ValueError("too long")
    result = json.loads(content)
    if not isinstance(result, dict):
        raise ValueError("no object")
    return result
