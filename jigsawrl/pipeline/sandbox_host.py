"""The inside of a user-code process: one JSON object a line comes in, one goes out, user code runs in between.

    first line in     {"target", "params", "methods", "paths", "threads", "timeout"}
    first line out    {"ready": {...}}  or  {"refused": why the target cannot be loaded}
    then in           {"id", "method", "args", "object", "history", "timeout"},  {"id", "drop", "timeout"}
                      or  {"id", "batch": [args, ...], "timeout"}
    then out          {"id", "seconds", "value"},  {"id", "seconds", "error"}
                      or  {"id", "seconds", "batch": [{"value"} or {"error"}, ...]}, null where it is too large
                      or  {"overdue": [[id, clear], ...]}

A sync target runs one call at a time in the main thread (`serial`), or many in threads of their own; an async
target runs on one event loop. The process ends as soon as its input does, whatever user code is doing.
Nothing is imported but the standard library, so that a process is up in a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NoReturn

MAX_REPLY = 8 << 20
MAX_ERROR = 300
LOOP_CALLS = 128  # calls at a time on the event loop of an async target


class Refused(Exception):
    """The target is not what the run needs; the message says why."""


class Printed:
    """What user code prints: where that cannot be written, the call goes on all the same. `jigsawrl.streams` has the
    same for our own processes; this one imports nothing of ours."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with suppress(OSError, AttributeError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def load(target: str) -> Callable[..., Any]:
    """The function or class that `file.py:name` or `package.module:name` names; any exception says why not."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise Refused("expected file.py:name or package.module:name")
    if place.endswith(".py"):
        path = os.path.abspath(place)
        if not os.path.isfile(path):
            raise Refused(f"there is no file {place}")
        sys.path.insert(0, os.path.dirname(path))
        stem = os.path.basename(path)[: -len(".py")]
        spec = importlib.util.spec_from_file_location(f"user_{stem}" if stem in sys.modules else stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise Refused(f"{place} does not define {name!r}")
        value = getattr(value, part)
    if not callable(value):
        raise Refused(f"{name} is of type {type(value).__name__}, neither a function nor a class")
    return value  # type: ignore[no-any-return]


def brief(error: BaseException) -> str:
    """One short line: what was raised, and the innermost line of Python that raised it."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be printed"
    where = ""
    step = error.__traceback__
    while step is not None and not isinstance(error, SyntaxError):
        file = step.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen"):
            where = f" ({os.path.basename(file)}:{step.tb_lineno})"
        step = step.tb_next
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    room = MAX_ERROR - len(where)
    return (line if len(line) <= room else line[: room - 3] + "...") + where


def plain(value: Any) -> Any:
    """Numpy's and torch's scalars and arrays as numbers and lists; anything else is not JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")


_encode = json.JSONEncoder(default=plain, separators=(",", ":")).encode


def runs_on_loop(target: Callable[..., Any], methods: list[str]) -> bool:
    """Whether calling the target, or for a class any of these methods, gives a coroutine."""
    called = [getattr(target, name) for name in methods] or [target, getattr(target, "__call__")]  # noqa: B004, B009
    return any(inspect.iscoroutinefunction(function) for function in called)


def describe(target: Callable[..., Any], params: dict[str, Any], methods: list[str]) -> dict[str, Any]:
    """The target's signature, by which the parent chooses arguments. Refuses a target that does not fit."""
    name = getattr(target, "__name__", type(target).__name__)
    if bool(methods) != inspect.isclass(target):
        wanted = f"a class with {' and '.join(methods)}" if methods else "a function"
        raise Refused(f"{name} must be {wanted}")
    for method in methods:
        if not callable(getattr(target, method, None)):
            raise Refused(f"class {name} has no method {method!r}")
    try:
        signature = inspect.signature(target)
    except ValueError:  # some built-ins have none
        return {"parameters": [], "required": [], "any_keyword": True}
    try:
        (signature.bind if methods else signature.bind_partial)(**params)
    except TypeError as error:
        raise Refused(f"params do not fit {name}{signature}: {error}") from None
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in signature.parameters.values() if p.kind in keyword]
    return {
        "parameters": [p.name for p in named],
        "required": [p.name for p in named if p.default is p.empty],
        "any_keyword": any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
    }


def value_field(value: Any) -> str:
    """`"value":...` as JSON text, or `"error":...` where it cannot be sent."""
    try:
        text = _encode(value)
    except Exception as error:
        return error_field(f"what it returned cannot be sent: {brief(error)}")
    if len(text) > MAX_REPLY:
        return error_field(f"it returned {len(text) >> 20} MiB; at most {MAX_REPLY >> 20} MiB can be sent")
    return f'"value":{text}'


def error_field(message: str) -> str:
    return f'"error":{_encode(message)}'


class Replies:
    """The way out; whole lines, from any thread. A process that cannot reply has no reason to live.

    Nor has a copy of it that user code has forked and let return: the call is answered by one.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._process = os.getpid()
        self._lock = threading.Lock()

    def answer(self, call: str, started: float, field: str) -> None:
        self._write(f'{{"id":"{call}","seconds":{time.perf_counter() - started},{field}}}')

    def send(self, message: dict[str, Any]) -> None:
        self._write(_encode(message))

    def _write(self, line: str) -> None:
        if os.getpid() != self._process:
            os._exit(0)
        data = memoryview(f"{line}\n".encode())
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                os._exit(1)


class Progress:
    """Tells whether the calls of this process could run freely, or may have waited for one another.

    They could if hardly anybody computed, and nobody held the interpreter or the loop: `held` is the time by which
    ticks came much too late.
    """

    def __init__(self, timeout: float) -> None:
        self.interval = min(max(timeout / 20, 0.005), 0.5)
        self._tolerated = timeout / 10  # a busy machine does that
        self._last = time.monotonic()
        self._held = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        late = now - self._last - self.interval
        if late > self._tolerated:
            self._held += late
        self._last = now

    def mark(self) -> tuple[float, float]:
        return self._held, time.process_time()

    def was_clear(self, since: tuple[float, float], timeout: float) -> bool:
        held, cpu = self.mark()
        return held - since[0] < timeout / 4 and cpu - since[1] < timeout / 10


class Host:
    """The target and the objects made from it."""

    def __init__(self, setup: dict[str, Any], replies: Replies) -> None:
        self.target = load(setup["target"])
        self.params: dict[str, Any] = setup["params"]
        self.about = describe(self.target, self.params, setup["methods"])
        self.on_loop = runs_on_loop(self.target, setup["methods"])
        self.threads: int = setup["threads"]
        self.timeout: float = setup["timeout"]
        self.replies = replies
        self.objects: dict[int, Any] = {}

    def work(self, message: dict[str, Any]) -> Generator[Any, Any, Any]:
        """Carries out one message; yields whatever user code returned and is sent it back, awaited."""
        if "drop" in message:
            close = getattr(self.objects.pop(message["drop"], None), "close", None)
            if close is not None:
                yield close()
            return None
        key, history = message["object"], message["history"]
        if key is None:
            return (yield self.target(**(self.params | message["args"])))
        if history is not None:
            self.objects[key] = yield self.target(**self.params)
            for method, args in history:
                yield getattr(self.objects[key], method)(**args)
        return (yield getattr(self.objects[key], message["method"])(**message["args"]))

    def outcomes(self, message: dict[str, Any]) -> str:
        """What came of one message, as a JSON field, whatever user code does."""
        if "batch" not in message:
            return self.outcome(message)
        calls = ({"object": None, "history": None, "args": args} for args in message["batch"])
        outcomes = ",".join(f"{{{self.outcome(call)}}}" for call in calls)
        return f'"batch":[{outcomes}]' if len(outcomes) <= MAX_REPLY else '"batch":null'

    def outcome(self, message: dict[str, Any]) -> str:
        """What came of one call, as a JSON field; SystemExit and its like are errors as any other."""
        work = self.work(message)
        value = None
        try:
            while True:
                value = work.send(value)
                if inspect.isawaitable(value):
                    value = _awaited(value)
        except StopIteration as done:
            return value_field(done.value)
        except BaseException as error:
            return error_field(brief(error))

    async def run_async(self, message: dict[str, Any], progress: Progress) -> None:
        """The same on the loop, where a call that takes too long can be cancelled alone."""
        import asyncio

        started, mark = time.perf_counter(), progress.mark()
        work = self.work(message)
        value = None
        try:
            async with asyncio.timeout(message["timeout"]) as scope:
                while True:
                    value = work.send(value)
                    if inspect.isawaitable(value):
                        value = await value
        except StopIteration as done:
            self.replies.answer(message["id"], started, value_field(done.value))
        except BaseException as error:
            if scope.expired():
                clear = progress.was_clear(mark, message["timeout"])
                self.replies.send({"overdue": [[message["id"], clear]]})
            else:
                self.replies.answer(message["id"], started, error_field(brief(error)))

    def serve_serially(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> NoReturn:
        """Signals, globals and libraries that are not thread-safe work as they do in a script."""
        self.replies.send({"ready": self.about | {"mode": "serial", "width": 1}})
        while True:
            message, started = inbox.get(), time.perf_counter()
            self.replies.answer(message["id"], started, self.outcomes(message))

    def serve_in_threads(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> NoReturn:
        """A thread cannot be stopped: overdue calls are reported together, and the parent ends the process."""
        from concurrent.futures import ThreadPoolExecutor

        progress = Progress(self.timeout)
        pool = ThreadPoolExecutor(self.threads)
        # Who takes a call out is the one to report it, as done or as overdue.
        running: dict[str, tuple[float, float, tuple[float, float]]] = {}

        def run(message: dict[str, Any]) -> None:
            running[message["id"]] = time.monotonic(), message["timeout"], progress.mark()
            started = time.perf_counter()
            outcomes = self.outcomes(message)
            if running.pop(message["id"], None) is not None:
                self.replies.answer(message["id"], started, outcomes)

        def receive() -> None:
            while True:
                pool.submit(run, inbox.get())

        self.replies.send({"ready": self.about | {"mode": "threads", "width": self.threads}})
        threading.Thread(target=receive, daemon=True).start()
        while True:
            time.sleep(progress.interval)
            progress.tick()
            now = time.monotonic()
            overdue = [
                [call, progress.was_clear(mark, timeout)]
                for call, (started, timeout, mark) in list(running.items())
                if now - started > timeout and running.pop(call, None) is not None
            ]
            if overdue:
                self.replies.send({"overdue": overdue})

    async def serve_on_loop(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> NoReturn:
        import asyncio

        loop = asyncio.get_running_loop()
        progress = Progress(self.timeout)
        tasks: set[asyncio.Task[None]] = set()

        def start(message: dict[str, Any]) -> None:
            task = loop.create_task(self.run_async(message, progress))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def receive() -> None:
            while True:
                loop.call_soon_threadsafe(start, inbox.get())

        self.replies.send({"ready": self.about | {"mode": "loop", "width": LOOP_CALLS}})
        threading.Thread(target=receive, daemon=True).start()
        while True:
            await asyncio.sleep(progress.interval)
            progress.tick()


def _awaited(value: Any) -> Any:
    """The outcome of what a sync function returned unawaited, such as a decorated coroutine."""
    import asyncio

    async def outcome() -> Any:
        return await value

    return asyncio.run(outcome())


def main(uncontained: str | None) -> NoReturn:
    """Serves until the end; no thread of user code keeps the process then.

    `uncontained` says why the process is in no PID namespace, if it is in none.
    """
    try:
        _serve(uncontained)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _serve(uncontained: str | None) -> NoReturn:
    commands, replies = os.dup(0), Replies(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # user code reads nothing from us,
    os.dup2(2, 1)  # and what it prints is not a reply
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stdout, sys.stderr = Printed(sys.stdout), Printed(sys.stderr)  # type: ignore[assignment]
    faulthandler.enable(all_threads=False)
    lines = os.fdopen(commands, "rb")
    first = lines.readline()
    if not first:
        os._exit(0)  # whoever started it is gone already
    setup = json.loads(first)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for line in lines:
                inbox.put(json.loads(line))
        finally:
            if sys.platform == "linux":  # its parent is the keeper, which user code may have stopped
                os.kill(os.getppid(), signal.SIGCONT)
            os.killpg(0, signal.SIGKILL)

    sys.path += [path for path in setup["paths"] if path not in sys.path]
    try:
        threading.Thread(target=listen, daemon=True).start()
        host = Host(setup, replies)
        host.about["uncontained"] = uncontained
    except BaseException as error:
        replies.send({"refused": str(error) if isinstance(error, Refused) else brief(error)})
        os._exit(1)
    if host.on_loop:
        import asyncio

        asyncio.run(host.serve_on_loop(inbox))
    elif host.threads > 1:
        host.serve_in_threads(inbox)
    else:
        host.serve_serially(inbox)
