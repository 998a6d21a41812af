"""What users ask of live runs: remembered on the disk before it is answered, and still true after any kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mixes import PATIENCE_S, SUMS, Command, events, learned, poll, start, write_mix

from jigsawrl.config.reserved import RESERVED
from jigsawrl.errors import JigsawError
from jigsawrl.runtime import control
from jigsawrl.runtime.control import Control, ask
from jigsawrl.runtime.replay import replayed
from jigsawrl.underway import under_way

pytestmark = pytest.mark.slow

LONG = SUMS | {"steps": 5000}


def mix_of(folder: Path, **runs: Any) -> Path:
    """On one worker, so that starting it costs little."""
    file = write_mix(folder, prompt=True, **runs)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"workers": 1}))
    return file


def jigsaw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jigsawrl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def entry(file: Path, **terms: Any) -> dict[str, Any]:
    return {"run": str(file), "steps": None, "priority": 0, "max_slowdown": None, "deadline": None, **terms}


def test_what_a_kill_leaves_of_commands_goes_on_as_it_was_asked_for(tmp_path: Path) -> None:
    """A submit, a refused one of the same name, a cancel and a pause; then SIGKILL to everything, and --resume."""
    file = mix_of(tmp_path, kept=LONG, dropped=LONG, still=LONG)
    new, other = tmp_path / "new.yaml", tmp_path / "other.yaml"
    new.write_text(json.dumps(SUMS | {"steps": 2}))
    other.write_text(json.dumps(SUMS | {"steps": 2, "seed": 5}))
    out = tmp_path / "out"
    first = start(file, out)
    again: Command | None = None
    try:
        first.wait_for_step("dropped")
        first.wait_for_step("still")
        assert ask(out, do="pause", pipeline="still")["pipelines"]["still"].startswith("pause")
        said = ask(out, do="cancel", pipeline="dropped")["pipelines"]["dropped"]
        assert said in ("ends after its step", "cancelled"), "never 'under way'"
        assert ask(out, do="submit", name="new", entry=entry(new))["pipelines"]["new"] == "to come"
        with pytest.raises(JigsawError, match="there is a pipeline new already"):
            ask(out, do="submit", name="new", entry=entry(other))
        first.kill_all()
        first.end()
        poll(lambda: not first.alive(), "processes are left")

        again = start(file, out, "--resume")
        again.wait_for(lambda: any(e["pipeline"] == "new" for e in events(out, "finished")), "the end of new")
        steps = len(learned(out / "still"))
        answer = ask(out, do="resume", pipeline="still")
        assert answer["pipelines"]["dropped"] == "cancelled"
        assert len(learned(out / "new")) == 2
        assert json.loads((out / "submitted.json").read_text())["new"]["run"] == str(new)
        assert len(learned(out / "still")) == steps
        again.wait_for(lambda: len(learned(out / "still")) > steps, "a step after the pause")
        assert ask(out, do="cancel", pipeline="dropped")["said"].startswith("dropped was cancelled before")
        again.signal(signal.SIGTERM)
        _, found = again.answer()
        assert {name: each["ended"] for name, each in found.items()} == {
            "kept": "interrupted",
            "dropped": "cancelled",
            "still": "interrupted",
            "new": "finished",
        }
        dropped = len(learned(out / "dropped"))
        taken_back = jigsaw("resume", out, "dropped")
        assert taken_back.stdout == "dropped: goes on when the run goes on with --resume\n"
        assert jigsaw("resume", out, "dropped").returncode == 2
        again = start(file, out, "--resume")
        again.wait_for(lambda: len(learned(out / "dropped")) > dropped, "a step of what was taken back")
        assert all(each.same for each in replayed(out))
    finally:
        for each in (first, again):
            if each is not None:
                each.kill_all()


def test_what_is_cancelled_or_stopping_ends_whoever_dies_and_whoever_wants_it_to_pause(
    tmp_path: Path,
) -> None:
    """Drivers stand still meanwhile, so that no step ends."""
    file = mix_of(tmp_path, a=LONG, b=LONG)
    out = tmp_path / "out"
    run = start(file, out)
    try:
        run.wait_for_step("a")
        run.wait_for_step("b")
        drivers = [*run.named("driver:a"), *run.named("driver:b")]
        for each in drivers:
            os.kill(each, signal.SIGSTOP)
        for _ in range(2):
            assert ask(out, do="cancel", pipeline="a")["pipelines"]["a"] == "ends after its step"
        with pytest.raises(JigsawError, match="a was cancelled and ends after its step; it cannot be paused"):
            ask(out, do="pause", pipeline="a")
        steps = len(learned(out / "a"))
        os.kill(drivers[0], signal.SIGKILL)
        run.wait_for(lambda: any(e["pipeline"] == "a" for e in events(out, "cancelled")), "its end")
        assert len(learned(out / "a")) <= steps + 1

        run.signal(signal.SIGTERM)
        run.wait_for(lambda: "stopping: steps" in run.said(), "the stop")
        with pytest.raises(
            JigsawError, match="it is stopping, and b ends after its step; it cannot be paused"
        ):
            ask(out, do="pause", pipeline="b")
        with pytest.raises(JigsawError, match="it is stopping"):
            ask(out, do="submit", name="c", entry=entry(tmp_path / "a.yaml"))
        assert ask(out, do="cancel", pipeline="a")["pipelines"]["b"] == "ends after its step"
        os.kill(drivers[1], signal.SIGCONT)
        _, found = run.answer()
        assert {name: each["ended"] for name, each in found.items()} == {"a": "cancelled", "b": "interrupted"}
        run.assert_nothing_is_left()
    finally:
        run.kill_all()


def test_commands_during_set_up_are_answered_at_once_and_obeyed_later(tmp_path: Path) -> None:
    """The first processes take seconds to be there. A run can be replayed whose pipelines were cancelled before they
    began, or died in set-up."""
    file = mix_of(tmp_path, a=SUMS | {"steps": 1}, never=LONG, dies=LONG)
    short = tmp_path / "short.yaml"
    short.write_text(json.dumps(SUMS | {"steps": 1}))
    out = tmp_path / "out"
    run = start(file, out)
    try:
        run.wait_for(lambda: (out / "control.json").exists(), "the socket")
        assert ask(out, do="cancel", pipeline="never")["pipelines"]["never"] == "ends before its first step"
        for _ in range(2):
            assert ask(out, do="submit", name="short", entry=entry(short))["pipelines"]["short"] == "to come"
        assert not run.named("actor0:a"), "all of this was answered before anybody was set up"
        killed: set[int] = set()
        while run.process.poll() is None and len(killed) < 4:  # more often than it is brought back
            for driver in set(run.named("driver:dies")) - killed:
                os.kill(driver, signal.SIGKILL)
                killed.add(driver)
        _, found = run.answer()
        assert {name: each["ended"] for name, each in found.items()} == {
            "a": "finished",
            "never": "cancelled",
            "dies": "failed",
            "short": "finished",
        }
        assert all(each.same for each in replayed(out))
    finally:
        run.kill_all()


def test_a_client_waits_for_a_run_that_is_starting(tmp_path: Path) -> None:
    """Its folder is empty at first, or has what a run that was killed has left."""
    (tmp_path / "control.json").write_text(json.dumps({"socket": "jigsawrl-nobody", "pid": 1}))
    heard: list[dict[str, Any]] = []
    with under_way(tmp_path):
        asking = threading.Thread(target=lambda: heard.append(ask(tmp_path, do="pause", pipeline="a")))
        asking.start()
        (tmp_path / "config.yaml").write_text("workers: 1\npipelines:\n  a: {run: a.yaml}\n")
        with Control(tmp_path, lambda request: {"pipelines": {"a": "paused"}}):
            asking.join(PATIENCE_S)
    assert heard == [{"pipelines": {"a": "paused"}}]


class Talker:
    """Sends bytes to a control socket as nobody should."""

    def __init__(self, out: Path) -> None:
        self.address = "\0" + json.loads((out / "control.json").read_text())["socket"]

    def connect(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.settimeout(PATIENCE_S)
        poll(lambda: one.connect_ex(self.address) == 0, "too many are waiting")
        return one

    def say(self, content: bytes) -> dict[str, Any]:
        with self.connect() as one:
            try:
                one.sendall(content)
                one.shutdown(socket.SHUT_WR)
            except OSError:  # it has heard enough
                pass
            said = b""
            try:
                while piece := one.recv(65536):
                    said += piece
            except OSError:
                pass
        return json.loads(said) if said else {}


NONSENSE = {
    "nothing": b"",
    "half an object": b'{"do": "pa',
    "no object": b"[1]",
    "deeply nested": b'{"do": ' * 100_000,
    "deeply nested list": b"[" * 500_000,
    "nested in an entry": b'{"do": "submit", "name": "x", "entry": ' + b'{"run": ' * 900 + b"1" + b"}" * 901,
    "no UTF-8": b'{"do": "pause", "pipeline": "\xff\xfe"}',
    "a lone surrogate": rb'{"do": "pause", "pipeline": "\ud800"}',
    "a huge number": b'{"do": "pause", "pipeline": ' + b"9" * 5000 + b"}",
    "not a number": b'{"do": NaN, "pipeline": Infinity}',
    "names of other types": b'{"do": "pause", "pipeline": ["a"]}',
    "an entry of another type": b'{"do": "submit", "name": "x", "entry": [1]}',
    "a name of another type": b'{"do": "submit", "name": {"x": 1}, "entry": {}}',
    "an entry without a file": b'{"do": "submit", "name": "x", "entry": {"workload": "y"}}',
    "unknown": b'{"do": "__class__"}',
    "a private name": b'{"do": "order", "pipeline": "a"}',
    "too long": b'{"do": "' + b"x" * (3 << 20),
}


def test_nonsense_on_the_socket_is_answered_or_closed_and_the_run_goes_on(tmp_path: Path) -> None:
    file = mix_of(tmp_path, a=LONG)
    out = tmp_path / "out"
    run = start(file, out)
    silent: list[socket.socket] = []
    try:
        run.wait_for_step("a")
        talker = Talker(out)
        for what, content in NONSENSE.items():
            began = time.monotonic()
            answer = talker.say(content)
            assert answer.get("error") or what == "too long", f"{what}: {answer}"
            assert time.monotonic() - began < PATIENCE_S / 2, what
        for _ in range(3 * control.MOST_CONNECTIONS):
            silent.append(talker.connect())
            silent[-1].sendall(b'{"do":')
        assert "error" in talker.say(b'{"do": "pause", "pipeline": "nobody"}')
        for name in ("store", "Profile.json", "../x", "-x", "A", "x" * 101):
            with pytest.raises(JigsawError, match=r"own files|cannot name a folder|differs in more"):
                ask(out, do="submit", name=name, entry=entry(tmp_path / "a.yaml"))
        steps = len(learned(out / "a"))
        run.wait_for(lambda: len(learned(out / "a")) > steps, "another step")
        assert ask(out, do="cancel", pipeline="a")["pipelines"]["a"] in ("ends after its step", "cancelled")
        assert run.answer()[1]["a"]["ended"] == "cancelled"
        assert {path.name for path in out.glob("[!.]*")} - RESERVED == {"a"}
    finally:
        for each in silent:
            each.close()
        run.kill_all()


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_S", 0.1)
    with Control(tmp_path, lambda request: {}), Talker(tmp_path).connect() as one:
        assert one.recv(1) == b""


def test_more_commands_at_a_time_than_are_answered_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MOST_AT_WORK", 1)
    (tmp_path / "config.yaml").write_text("workers: 1\npipelines:\n  a: {run: a.yaml}\n")
    began, done = threading.Event(), threading.Event()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        began.set()
        done.wait(PATIENCE_S)
        return {"pipelines": {}}

    with under_way(tmp_path), Control(tmp_path, answer):
        first = threading.Thread(target=lambda: ask(tmp_path, do="pause", pipeline="a"))
        first.start()
        assert began.wait(PATIENCE_S)
        with pytest.raises(JigsawError, match="too many commands"):
            ask(tmp_path, do="pause", pipeline="a")
        done.set()
        first.join(PATIENCE_S)
