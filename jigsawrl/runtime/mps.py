"""NVIDIA's Multi-Process Service, for one run: processes that are its clients use a GPU at the same time.

Without it they take turns. The daemon has folders of its own, so it meddles with no other, and any user may start it.
A shell looks after it: as soon as the process that wanted it closes a pipe, or ends in whatever way, the daemon is
told to quit and its folders are removed.

Clients share their fate: where one reads memory that is not its own, nothing that any of them asks of the GPU from
then on succeeds, and new ones are refused until the last of the old has ended.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PATIENCE_S = 10.0
"""For the daemon to answer, and for it to end."""
ASK_S = 5.0
READY_S = 60.0
"""For all clients to end after one's mistake, and for the server to take others."""
NOT_READY = 807
"""What CUDA answers until then."""
FAULT = "FAULT"
"""What the daemon says of a server then."""
PAUSE_S = 0.05

LOOK_AFTER = """
"$1" -f >"$2/out" 2>&1 </dev/null & daemon=$!
read -r _
echo quit -t 2 | "$1" >/dev/null 2>&1 || kill "$daemon" 2>/dev/null
wait "$daemon"
rm -rf "$2"
"""
"""$1 is the control program, $2 the folder. `read` returns when the pipe's other end is closed."""


class NoMps(Exception):
    """There is none here; the reason, in one line."""


class Mps:
    """Started at once, or NoMps. Whoever has `environment` before he first uses the GPU is a client."""

    def __init__(self) -> None:
        self.control = shutil.which(CONTROL) or ""
        if not self.control:
            raise NoMps(f"{CONTROL} is not installed")
        self.folder = Path(tempfile.mkdtemp(prefix="jigsawrl-mps-"))
        self.environment: Mapping[str, str] = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }
        for each in self.environment.values():
            os.mkdir(each)
        self.keeper = subprocess.Popen(
            ["/bin/sh", "-c", LOOK_AFTER, "sh", self.control, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment},
            start_new_session=True,  # a Ctrl-C is not for it
        )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def servers(self) -> list[int]:
        """Process ids; there is one as soon as a client has come."""
        return [int(line) for line in (self._ask("get_server_list") or "").split() if line.isdigit()]

    def is_broken(self) -> bool:
        """Whether a client's mistake has ended all of them."""
        return any(
            FAULT in (self._ask(f"get_server_status {server}") or "").split() for server in self.servers()
        )

    def close(self) -> None:
        """Returns when the daemon is gone, with all that it started and wrote."""
        assert self.keeper.stdin is not None
        with suppress(BrokenPipeError):
            self.keeper.stdin.close()
        try:
            self.keeper.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.keeper.pid, signal.SIGKILL)
            self.keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self._ask("get_server_list") is None:
            if time.monotonic() > until:
                raise NoMps(f"{CONTROL} does not answer{self._last_words()}")
            time.sleep(PAUSE_S)

    def _last_words(self) -> str:
        with suppress(OSError):
            said = (self.folder / "out").read_text().split("\n")
            if lines := [line.strip() for line in said if line.strip()]:
                return f": {lines[-1]}"
        return ""

    def _ask(self, command: str) -> str | None:
        """The daemon's answer; None where there is none."""
        try:
            asked = subprocess.run(
                [self.control],
                input=f"{command}\n",
                capture_output=True,
                text=True,
                timeout=ASK_S,
                env={**os.environ, **self.environment},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return asked.stdout if asked.returncode == 0 else None


def wait_to_be_taken(initialize: Callable[[], int] | None = None) -> None:
    """Before a client first uses a GPU: whatever else is wrong, it finds out by itself."""
    initialize = initialize or (lambda: int(ctypes.CDLL("libcuda.so.1").cuInit(0)))
    until = time.monotonic() + READY_S
    while initialize() == NOT_READY and time.monotonic() < until:
        time.sleep(PAUSE_S)
