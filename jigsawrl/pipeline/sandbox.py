"""User code (rewards, environments) in processes of its own: whatever it does, this process goes on.

    Sandbox (any thread) -> Pool (one thread: who runs what, who is to blame) -> Child -> pipe -> sandbox_host

A call ends in what user code returned, or in a `Failure`: it raised, ran past its timeout, or ended its process.
It never ends in an exception, and never does not end. Nothing but JSON passes, so nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from jigsawrl.pipeline.sandbox_child import Failure
from jigsawrl.pipeline.sandbox_pool import CLOSED, Pool

__all__ = ["Failure", "Sandbox", "Signature", "then"]

T = TypeVar("T")
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Signature:
    """What can be passed to the target by name; `any_keyword` means anything can."""

    parameters: tuple[str, ...]
    required: tuple[str, ...]
    any_keyword: bool


class Sandbox:
    """Calls one function, or the `methods` of instances of one class, in up to `processes` processes.

    Async code overlaps on the loop of each process. Sync code runs `threads` calls at a time in each; with one
    thread that is the main thread, where signals and libraries that are not thread-safe work as in a script.
    `params` are passed to every call of the function, or to the class.
    """

    def __init__(
        self,
        target: str,
        params: dict[str, Any],
        *,
        processes: int,
        timeout: float,
        threads: int = 1,
        methods: Sequence[str] = (),
    ) -> None:
        setup = {
            "target": target,
            "params": params,
            "methods": list(methods),
            "folder": os.getcwd(),
            "paths": [os.path.abspath(path) for path in sys.path if path],
            "threads": threads,
            "timeout": timeout,
        }
        _encode(setup)  # a TypeError belongs to the caller
        self._about: Future[dict[str, Any]] = Future()
        self._pool = Pool(setup, processes, self._about)
        self._lock = threading.Lock()
        self._inbox: list[Callable[[], None]] = []
        self._closed = False
        self._loop = asyncio.SelectorEventLoop()
        self._loop.call_soon(self._pool.start)
        # Processes are started on this thread, and Linux ends them with the thread that started them.
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"sandbox {target}", daemon=True)
        self._thread.start()

    def check(self) -> Signature:
        """Waits until the target is loaded; JigsawError, with the user's own error, if it cannot be."""
        about = self._about.result()
        return Signature(tuple(about["parameters"]), tuple(about["required"]), about["any_keyword"])

    def uncontained(self) -> str | None:
        """Why user code runs in no PID namespace, or None where it runs in one. Waits until the target is loaded."""
        reason: str | None = self._about.result()["uncontained"]
        return reason

    def call(self, method: str | None, args: dict[str, Any], key: str | None = None) -> Future[Any]:
        """Calls the function (no method), or a method of the instance named `key`, which the first call makes.

        An instance takes one call at a time. One that failed answers every further call with its Failure; one whose
        process has ended is made again elsewhere, by repeating its calls.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        encoded = _encode(args)
        if not self._post(lambda: self._pool.submit(future, method, encoded, key)):
            future.set_result(CLOSED)
        return future

    def map(self, calls: Sequence[dict[str, Any]]) -> Future[list[Any]]:
        """Calls the function once with each of these arguments; the results, or Failures, in their order."""
        future: Future[list[Any]] = Future()
        future.set_running_or_notify_cancel()
        batch = tuple(_encode(args) for args in calls)
        if not batch:
            future.set_result([])
        elif not self._post(lambda: self._pool.submit_many(future, batch)):
            future.set_result([CLOSED] * len(batch))
        return future

    def drop(self, key: str) -> None:
        """Forgets an instance; its own `close()`, if it has one, is called."""
        self._post(lambda: self._pool.drop(key))

    def close(self) -> None:
        """Leaves no process behind, and no call unanswered. May be called twice."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join()
        if first:
            self._loop.close()

    async def _close(self) -> None:
        self._drain()
        await self._pool.close()
        self._loop.stop()

    def _post(self, action: Callable[[], None]) -> bool:
        """Actions that come in quick succession wake the other thread once. False: closed."""
        with self._lock:
            if self._closed:
                return False
            self._inbox.append(action)
            if len(self._inbox) == 1:
                self._loop.call_soon_threadsafe(self._drain)
            return True

    def _drain(self) -> None:
        with self._lock:
            actions, self._inbox = self._inbox, []
        for action in actions:
            action()
        self._pool.pump()


def then(future: Future[Any], finish: Callable[[Any], T]) -> Future[T]:
    """What `finish` makes of the result once it is there; it may raise."""
    following: Future[T] = Future()
    following.set_running_or_notify_cancel()

    def settle(done: Future[Any]) -> None:
        try:
            following.set_result(finish(done.result()))
        except Exception as error:
            following.set_exception(error)

    future.add_done_callback(settle)
    return following
