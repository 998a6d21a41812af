"""Which process runs which call, and who is to blame when one ends badly.

    submitted -> queue ----------------> a process, with others ---> answered
                   ^                       |             |
                   |  was not running,     |  overdue    |  running when the process died,
                   +--or not overdue ------+             v  or overdue while others may have held it up
                                           |          suspects -> a process of its own -> answered
                                           v                              |
                                        Failure <-------------------------+  overdue, or dead in a fresh process

So a call fails if it fails alone, and never for what its neighbours did. Every process that is ended settles at
least one call, or makes it a suspect, and a suspect is settled alone: all calls come to an end.
Everything here happens on one thread, the loop's.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from jigsawrl import limits
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import LONGEST_LOOK_S
from jigsawrl.pipeline.sandbox_child import Call, Child, Failure, Instance

START_TIMEOUT = 120.0  # for the imports of user code
_STARTS = 3  # failing starts in a row after which no more are tried
_AHEAD = 0.01  # seconds of work that lie ready in a serial process, so that it need not wait for us
_MOST_AHEAD = 64
_GRACE = 0.25  # of the timeout, for a process with many calls to report the overdue ones itself
_PATIENCE = 1.0  # seconds for user code to close its instances when all is closed
_LAST_WAIT = 10.0  # seconds for the kernel to end killed processes, far more than it needs
CLOSED = Failure("died", "the sandbox is closed")


class Pool:
    """At most `processes` processes that share the work, and as many for suspects while there are any."""

    def __init__(self, setup: dict[str, Any], processes: int, about: Future[dict[str, Any]]) -> None:
        self._setup = setup
        self._timeout: float = setup["timeout"]
        self._processes = processes
        self._about = about  # settled by the first process that is ready, or cannot be
        self._ids = itertools.count()
        self._children: list[Child] = []
        self._queue: deque[Call] = deque()
        self._suspects: deque[Call] = deque()
        self._drops: set[asyncio.Future[None]] = set()
        self._instances: dict[str, Instance] = {}
        self._seconds = 0.001  # moving mean of what a call takes
        self._failed_starts = 0
        self._start_failure = Failure("died", "no process could be started")
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Future[None]] = set()
        self._pumping = False
        self._closed = False
        self._looked = time.monotonic()

    def start(self) -> None:
        for _ in range(self._processes):
            self._spawn(alone=False)
        self._tick()

    def submit(self, future: Future[Any], method: str | None, args: str, key: str | None) -> None:
        """The result goes to the future; the work is handed out by the next `pump`."""
        instance = None
        if key is not None:
            instance = self._instances.setdefault(key, Instance(next(self._ids)))
        if instance is not None and instance.busy:
            future.set_exception(RuntimeError(f"{key}: one call at a time"))
        elif instance is not None and instance.failure is not None:
            future.set_result(instance.failure)
        else:
            if instance is not None:
                instance.busy = True
            self._place(Call(_new_id(), future.set_result, method, args, instance))

    def submit_many(self, future: Future[list[Any]], batch: tuple[str, ...]) -> None:
        """Calls of the function; in one message where that keeps no process waiting for work."""

        def done(results: Any) -> None:
            future.set_result([results] * len(batch) if isinstance(results, Failure) else results)

        call = Call(_new_id(), done, batch=batch)
        cheap = self._seconds * len(batch) < _AHEAD
        if cheap and any(child.mode == "serial" for child in self._children):
            self._place(call)
        else:
            self._queue.extend(self._single(call))

    def _single(self, call: Call) -> list[Call]:
        """The calls of a batch, one by one, which together answer it."""
        results: list[Any] = [None] * len(call.batch)
        missing = len(results)

        def done(position: int, result: Any) -> None:
            nonlocal missing
            results[position] = result
            missing -= 1
            if not missing:
                call.done(results)

        return [
            Call(_new_id(), functools.partial(done, position), args=args)
            for position, args in enumerate(call.batch)
        ]

    def drop(self, key: str) -> None:
        """Forgets an instance, and has user code close it once its call under way has ended."""
        instance = self._instances.pop(key, None)
        if instance is not None:
            instance.dropped = True
            if not instance.busy:
                self._evict(instance)

    async def close(self) -> None:
        """Has user code close its instances, with some patience; then ends everything."""
        for key in list(self._instances):
            self.drop(key)
        self._closed = True
        in_flight = [call for child in self._children for call in (*child.in_flight.values(), *child.waiting)]
        for call in (*self._queue, *self._suspects, *in_flight):
            if not call.drop:
                call.done(CLOSED)
        self._queue.clear()
        self._suspects.clear()
        self.pump()
        if self._drops:
            await asyncio.wait(self._drops, timeout=_PATIENCE)
        for child in list(self._children):
            self._end(child)
        for settled in (self._starting, self._ending):
            if settled:
                await asyncio.wait(settled, timeout=_LAST_WAIT)
        if not self._about.done():
            self._about.set_exception(JigsawError("closed before user code was loaded"))

    def pump(self) -> None:
        """Hands out all the work that can be handed out now."""
        self._pumping = False
        shared = [child for child in self._children if not child.alone]
        alone = [child for child in self._children if child.alone]
        for child in self._children:
            while child.waiting and len(child.in_flight) < self._room(child):
                self._send(child, child.waiting.popleft())
        for child in alone:
            if not child.in_flight and self._suspects and child.ready:
                self._send(child, self._suspects.popleft())
            elif not child.in_flight and not self._suspects:
                self._end(child)
        while free := [child for child in shared if len(child.in_flight) < self._room(child)]:
            if not self._queue:
                break
            self._send(min(free, key=_load), self._queue.popleft())
        expected = sum(not child.in_flight for child in alone)
        for _ in range(min(len(self._suspects) - expected, self._processes - len(alone))):
            self._spawn(alone=True)
        for _ in range(self._processes - len(shared) if self._queue else 0):
            self._spawn(alone=False)
        for child in self._children:
            child.flush()
        if self._failed_starts >= _STARTS:
            self._give_up()

    def _pump_soon(self) -> None:
        """Once for all the messages that came together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self.pump)

    def _room(self, child: Child) -> int:
        """How many calls a process may have: as many as it runs at a time; some more where they run in turn."""
        if child.mode != "serial" or child.alone:
            return child.width
        return 1 + min(_MOST_AHEAD, int(_AHEAD / self._seconds))

    def _place(self, call: Call) -> None:
        home = None if call.instance is None else call.instance.home
        (self._queue if home is None else home.waiting).append(call)

    def _send(self, child: Child, call: Call) -> None:
        replayed = 0
        if call.instance is not None and call.instance.home is not child:
            replayed = len(call.instance.history)
        call.timeout = self._timeout * (1 + replayed)
        child.send(call)
        if call.instance is not None and not call.drop:
            call.instance.home = child
            child.instances.add(call.instance)

    def _spawn(self, alone: bool) -> None:
        if self._closed or self._failed_starts >= _STARTS:
            return
        child = Child(self._setup, alone, self._on_message, self._on_exit)
        self._children.append(child)
        task = asyncio.get_running_loop().create_task(self._start(child))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, child: Child) -> None:
        try:
            await child.start()
        except OSError as error:
            child.gone.set_result(None)
            self._on_exit(child, f"could not be started: {error}")

    def _on_message(self, child: Child, message: dict[str, Any]) -> None:
        if "id" in message:
            self._on_answer(child, message)
        elif "overdue" in message:
            self._on_overdue(child, message["overdue"])
        elif "ready" in message:
            child.mode, child.width = message["ready"]["mode"], message["ready"]["width"]
            self._failed_starts = 0
            if not self._about.done():
                self._about.set_result(message["ready"])
        else:
            self._start_failed(child, message["refused"])
        self._pump_soon()

    def _on_answer(self, child: Child, message: dict[str, Any]) -> None:
        call = child.take(message["id"])
        if call.batch and message["batch"] is None:
            self._queue.extendleft(reversed(self._single(call)))
            return
        self._seconds += 0.1 * (message["seconds"] / max(1, len(call.batch)) - self._seconds)
        if call.batch:
            self._finish(call, [_result(outcome) for outcome in message["batch"]])
            return
        result = _result(message)
        if call.instance is not None and not call.drop and not isinstance(result, Failure):
            call.instance.history.append(call.step)
        self._finish(call, result)

    def _on_overdue(self, child: Child, reported: list[tuple[str, bool]]) -> None:
        """The process says which calls are overdue, and whether each could run freely all the time."""
        overdue = [(child.in_flight[id], clear) for id, clear in reported]
        blamed = [call for call, clear in overdue if clear or not child.had_company(call)]
        suspects = [call for call, _ in overdue if call not in blamed]
        if child.mode == "threads":
            self._retire(child, blamed, suspects, self._too_long)
            return
        for call, _ in overdue:  # the loop has cancelled them, and goes on with the others
            child.take(call.id)
            if call.instance is not None and not call.drop:
                self._evict(call.instance)
        self._judge(blamed, suspects, self._too_long)

    def _on_exit(self, child: Child, how: str) -> None:
        if child not in self._children:
            return
        if not child.ready:
            self._start_failed(child, f"its process {how}")
        else:
            running = child.running()
            certain = len(running) == 1 and not child.served
            failure = Failure("died", f"its process {how}")
            self._retire(child, running if certain else [], [] if certain else running, failure)
        self._pump_soon()

    def _start_failed(self, child: Child, why: str) -> None:
        """User code that never loaded is for the user to mend; one that did may be given another try or two."""
        problem = f"cannot load {self._setup['target']}: {limits.cause_in(why) or why}"
        self._start_failure = Failure("died", problem)
        self._failed_starts += 1
        if not self._about.done():
            self._about.set_exception(JigsawError(problem))
            self._failed_starts = _STARTS
        self._end(child)

    def _give_up(self) -> None:
        while self._queue and all(child.alone for child in self._children):
            self._finish(self._queue.popleft(), self._start_failure)
        while self._suspects and not any(child.alone for child in self._children):
            self._finish(self._suspects.popleft(), self._start_failure)

    def _tick(self) -> None:
        """Finds the processes that are overdue and cannot say so: one call, or one that holds up all others.

        A long time between two looks does not count: this process was stopped, and perhaps all others.
        """
        now = time.monotonic()
        stopped = now - self._looked - LONGEST_LOOK_S
        self._looked = now
        for child in list(self._children):
            child.excuse(max(0.0, stopped))
            latest = 1.0 if child.mode == "serial" else 1 + _GRACE
            if not child.ready and now - child.started > START_TIMEOUT:
                self._start_failed(child, f"it took longer than {START_TIMEOUT:g} s")
            elif any(now - call.started > call.timeout * latest for call in child.running()):
                overdue = [call for call in child.running() if now - call.started > call.timeout]
                suspects = [call for call in overdue if child.had_company(call)]
                blamed = [call for call in overdue if call not in suspects]
                self._retire(child, blamed, suspects, self._too_long)
        self.pump()
        if not self._closed:
            interval = min(max(self._timeout / 20, 0.005), 0.5)
            asyncio.get_running_loop().call_later(interval, self._tick)

    @property
    def _too_long(self) -> Failure:
        return Failure("timeout", f"it took longer than {self._timeout:g} s")

    def _retire(self, child: Child, blamed: list[Call], suspects: list[Call], failure: Failure) -> None:
        """Ends a process. Calls in it that are neither blamed nor suspected start again elsewhere."""
        settled = {call.id for call in (*blamed, *suspects)}
        rest = [call for call in (*child.in_flight.values(), *child.waiting) if call.id not in settled]
        self._end(child)
        self._judge(blamed, suspects, failure)
        self._judge([call for call in rest if call.drop], [], failure)
        self._queue.extendleft(call for call in reversed(rest) if not call.drop)

    def _judge(self, blamed: list[Call], suspects: list[Call], failure: Failure) -> None:
        """A batch is never judged: its calls are, when they have been made one by one."""
        batches = [call for call in (*blamed, *suspects) if call.batch]
        self._queue.extendleft(reversed([single for call in batches for single in self._single(call)]))
        for call in (*blamed, *(call for call in suspects if call.drop)):
            if not call.batch:
                self._finish(call, failure)
        self._suspects.extend(call for call in suspects if not call.drop and not call.batch)

    def _end(self, child: Child) -> None:
        self._children.remove(child)
        child.kill()
        if not child.gone.done():
            self._ending.add(child.gone)
            child.gone.add_done_callback(self._ending.discard)
        for instance in child.instances:
            instance.home = None

    def _finish(self, call: Call, result: Any) -> None:
        instance = call.instance
        if instance is not None and not call.drop:
            instance.busy = False
            if isinstance(result, Failure):
                instance.failure = result
            if instance.dropped or (instance.home is not None and instance.home.alone):
                self._evict(instance)
        if call.drop or not self._closed:  # else it is answered already
            call.done(result)

    def _evict(self, instance: Instance) -> None:
        """Closes the object itself; what is known of it here is enough to make it again."""
        home = instance.home
        if home is None:
            return
        instance.home = None
        home.instances.discard(instance)
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drops.add(closed)
        closed.add_done_callback(self._drops.discard)
        home.waiting.append(Call(_new_id(), lambda _: closed.set_result(None), instance=instance, drop=True))


def _new_id() -> str:
    """One that user code cannot guess, so that it answers no call but by reading our part of its memory."""
    return secrets.token_hex(8)


def _result(outcome: dict[str, Any]) -> Any:
    return Failure("raised", outcome["error"]) if "error" in outcome else outcome["value"]


def _load(child: Child) -> int:
    return len(child.in_flight) + len(child.waiting) + len(child.instances)
