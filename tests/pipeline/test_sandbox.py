"""Real processes, and user code that does its worst in them."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline import sandbox_host, sandbox_pool
from jigsawrl.pipeline.sandbox import Failure, Sandbox

USER_CODE = Path(__file__).with_name("user_code.py")
Make = Callable[..., Sandbox]

# how the user code runs: function, calls at a time
MODES = {"serial": ("behave", 1), "threads": ("behave", 8), "loop": ("behave_async", 1)}


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Sandbox] = []

    def sandbox(name: str, *, processes: int = 1, timeout: float = 10.0, **more: Any) -> Sandbox:
        made.append(
            Sandbox(
                f"{USER_CODE}:{name}", more.pop("params", {}), processes=processes, timeout=timeout, **more
            )
        )
        return made[-1]

    yield sandbox
    for one in made:
        one.close()
    assert not host_processes()


def host_processes() -> list[int]:
    """The user-code processes of this one, by what the kernel says; zombies as well."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and (b"sandbox_host" in command or not command):
                found.append(int(folder.name))
    return found


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], seconds)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


def marked(mark: str) -> list[int]:
    """Processes with the mark in their command line; user code knows them by other numbers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def results(sandbox: Sandbox, *what: str) -> list[Any]:
    return [future.result(30) for future in [sandbox.call(None, {"what": one}) for one in what]]


# What works


@pytest.mark.parametrize("mode", MODES)
def test_results_come_back_to_the_calls_they_belong_to(make: Make, mode: str) -> None:
    function, threads = MODES[mode]
    sandbox = make(function, processes=2, threads=threads)
    what = [f"{n}" for n in range(300)]
    assert results(sandbox, *what) == what


def test_many_calls_in_one_go_come_back_in_order(make: Make) -> None:
    sandbox = make("behave", processes=2)
    sandbox.check()
    groups = [[f"{g} {n}" for n in range(8)] for g in range(16)]
    futures = [sandbox.map([{"what": what} for what in group]) for group in groups]
    assert [future.result(30) for future in futures] == groups
    assert sandbox.map([]).result(0) == []


def test_params_are_passed_to_every_call(make: Make) -> None:
    sandbox = make("greet", params={"greeting": "good day"})
    assert sandbox.call(None, {"name": "Ann"}).result(30) == "good day Ann"
    assert sandbox.check().parameters == ("name", "greeting")
    assert sandbox.check().required == ("name",)


def test_a_module_is_found_as_python_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(USER_CODE.parent))
    sandbox = Sandbox("user_code:greet", {}, processes=1, timeout=10)
    assert sandbox.call(None, {"name": "Bob"}).result(30) == "hello Bob"
    sandbox.close()


def test_a_file_is_relative_to_the_current_folder_and_may_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "json.py").write_text("from neighbour import two\ndef double(x): return two * x\n")
    (tmp_path / "code" / "neighbour.py").write_text("two = 2\n")
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox("code/json.py:double", {}, processes=1, timeout=10)  # a name that Python has, too
    assert sandbox.call(None, {"x": 21}).result(30) == 42
    sandbox.close()


def test_numbers_of_numpy_are_numbers(make: Make) -> None:
    result = make("numpy_scalar").call(None, {}).result(30)
    assert result == {"score": 0.5, "right": True, "all": [0, 1, 2]}


def test_a_sync_function_has_the_main_thread_of_its_process(make: Make) -> None:
    assert make("alarmed").call(None, {}).result(30) == "alarmed"


def test_every_process_iterates_over_a_set_alike(make: Make) -> None:
    orders = {tuple(make("iterate").call(None, {}).result(30)) for _ in range(2)}
    assert len(orders) == 1


def test_what_user_code_prints_and_reads_disturbs_nobody(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    assert results(make("behave"), "print", "a") == ["print", "a"]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("p") >= 200_000
    assert printed.err.count("q") == 200_000


@pytest.mark.parametrize("mode", ["threads", "loop"])
def test_waits_overlap(make: Make, mode: str) -> None:
    function, _ = MODES[mode]
    sandbox = make(function, threads=64)
    sandbox.check()
    started = time.monotonic()
    assert results(sandbox, *["siesta"] * 64) == ["siesta"] * 64
    assert time.monotonic() - started < 6  # one after the other: 13 s


# What does not

BAD = {
    "exit": Failure("died", "its process exited with code 7"),
    "kill": Failure("died", "its process was killed by SIGKILL"),
    "segfault": Failure("died", "its process was killed by SIGSEGV"),
    "garble": Failure("died", "its process wrote into the pipe that is for its replies"),
    "close all": Failure("died", "its process "),
    "sys.exit": Failure("raised", "SystemExit: enough (user_code.py:"),
    "unprintable": Failure("raised", "Unprintable: its message cannot be printed (user_code.py:"),
    "recursion": Failure("raised", "RecursionError: "),
    "raise": Failure("raised", "ValueError: a long story a long story"),
    "stop": Failure("raised", "RuntimeError: "),
    "not json": Failure("raised", "what it returned cannot be sent: TypeError: a set is not JSON"),
    "circle": Failure("raised", "what it returned cannot be sent: ValueError: "),
    "huge": Failure("raised", "it returned 9 MiB; at most 8 MiB can be sent"),
    "loop": Failure("timeout", "it took longer than 0.3 s"),
    "sleep": Failure("timeout", "it took longer than 0.3 s"),
    "regex": Failure("timeout", "it took longer than 0.3 s"),
    "await forever": Failure("timeout", "it took longer than 0.3 s"),
}
QUICK = [
    "exit",
    "segfault",
    "sys.exit",
    "unprintable",
    "recursion",
    "raise",
    "stop",
    "not json",
    "circle",
    "huge",
]


def assert_blamed(result: Any, what: str) -> None:
    """An error of user code also says its line, and stays one line."""
    expected = BAD[what]
    assert isinstance(result, Failure), result
    assert (result.kind, result.message[: len(expected.message)]) == (expected.kind, expected.message)
    assert len(result.message) <= 400
    assert "\n" not in result.message


@pytest.mark.parametrize("mode", MODES)
def test_only_the_guilty_call_fails(make: Make, mode: str) -> None:
    """All at once, in one process, each between innocent calls, some of them under way."""
    function, threads = MODES[mode]
    sandbox = make(function, threads=threads)
    what = ["nap", "nap", *(one for bad in QUICK for one in ("good", bad))]
    for one, result in zip(what, results(sandbox, *what), strict=True):
        if one in BAD:
            assert_blamed(result, one)
        else:
            assert result == one


@pytest.mark.parametrize(
    ("mode", "bad"),
    [
        ("serial", "regex"),
        ("serial", "garble"),
        ("serial", "close all"),
        ("threads", "sleep"),
        ("threads", "regex"),
        ("loop", "await forever"),
        ("loop", "sleep"),
    ],
)
def test_only_the_hanging_call_fails(make: Make, mode: str, bad: str) -> None:
    """Whether it waits, computes, holds the interpreter, or holds up the loop that all share."""
    function, threads = MODES[mode]
    sandbox = make(function, threads=threads, timeout=0.3)
    sandbox.check()
    before, guilty, *after = results(sandbox, "nap", bad, "nap", "good")
    assert_blamed(guilty, bad)
    assert [before, *after] == ["nap", "nap", "good"]


def test_a_call_under_way_when_its_process_is_ended_starts_again(make: Make) -> None:
    sandbox = make("behave", threads=8, timeout=0.6)
    sandbox.check()
    guilty = sandbox.call(None, {"what": "sleep"})
    others = []
    while not guilty.done():  # so that there is always one under way
        others.append(results(sandbox, "nap"))
    assert guilty.result().kind == "timeout"
    assert others == [["nap"]] * len(others)


def test_a_batch_with_a_bad_call_fails_for_that_call_only(make: Make) -> None:
    sandbox = make("behave", timeout=0.3)
    sandbox.check()
    results = sandbox.map([{"what": what} for what in ("a", "exit", "b", "raise", "loop", "c")]).result(30)
    assert [result if isinstance(result, str) else result.kind for result in results] == [
        "a", "died", "b", "raised", "timeout", "c",
    ]  # fmt: skip


def test_a_call_that_was_only_there_when_its_process_died_is_not_blamed(make: Make) -> None:
    what = [f"{n}" for n in range(20)]
    assert results(make("tired"), *what) == what


def test_calls_that_compute_side_by_side_are_not_blamed_for_being_slow_together(make: Make) -> None:
    """Twenty calls of 0.03 s share one interpreter: together they take 0.6 s, and would all time out."""
    sandbox = make("behave", threads=20, timeout=0.5)
    assert results(sandbox, *["nap"] * 20) == ["nap"] * 20  # there are twenty threads now
    assert results(sandbox, *["work"] * 20) == ["work"] * 20


@pytest.mark.parametrize(("mode", "bad"), [("threads", "sleep"), ("loop", "await forever")])
def test_calls_that_hang_together_are_found_out_together(make: Make, mode: str, bad: str) -> None:
    function, _ = MODES[mode]
    sandbox = make(function, threads=32, timeout=0.6)
    sandbox.check()
    started = time.monotonic()
    found = results(sandbox, *[bad] * 32)
    assert {result.kind for result in found} == {"timeout"}
    assert time.monotonic() - started < 9  # one after the other: 19 s


def test_the_number_of_processes_is_bounded(make: Make) -> None:
    sandbox = make("behave", processes=2, threads=8)
    futures = [sandbox.call(None, {"what": what}) for what in ["exit", "nap", "good"] * 3]
    most = 0
    while wait(futures, timeout=0.01).not_done:
        most = max(most, len(host_processes()))
    assert most <= 6  # two to share the work, two for suspects, two on their way out
    assert [future.result() for future in futures[1::3]] == ["nap"] * 3


def test_what_user_code_has_started_ends_with_it(make: Make, tmp_path: Path) -> None:
    sandbox = make("spawn_and_hang", timeout=2.0)
    call = sandbox.call(None, {"mark": str(tmp_path)})
    while not (found := marked(str(tmp_path))) and not call.done():
        time.sleep(0.001)
    assert found
    assert call.result(30).kind == "timeout"
    for pid in found:
        wait_until_gone(pid)


# The target


def refusal(target: str, params: dict[str, Any] | None = None, **more: Any) -> str:
    sandbox = Sandbox(target, params or {}, processes=1, timeout=10, **more)
    try:
        assert sandbox.call(None, {}).result(30).kind == "died"
        with pytest.raises(JigsawError) as caught:
            sandbox.check()
        assert target in str(caught.value)
        return str(caught.value)
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (mine.py:1)"),
        ("x = 1\nf = 1 / 0", "ZeroDivisionError: division by zero (mine.py:2)"),
        ("def f(:\n  pass", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("def g(): pass", "does not define 'f'"),
        ("f = 3", "f is of type int, neither a function nor a class"),
        ("class f: pass", "f must be a function"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (mine.py:2)"),
        ("import os\nos._exit(3)", "its process exited with code 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "its process was killed by SIGKILL"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_refused_with_the_users_own_error(
    tmp_path: Path, code: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    assert said in refusal(f"{tmp_path}/mine.py:f")


def test_a_target_that_does_not_fit_is_refused() -> None:
    assert "there is no file nowhere.py" in refusal("nowhere.py:f")
    assert "No module named 'nowhere'" in refusal("nowhere:f")
    assert "expected file.py:name or package.module:name" in refusal("compute_score")
    assert "got an unexpected keyword argument 'volume'" in refusal(f"{USER_CODE}:greet", {"volume": 3})
    assert "class NoStep has no method 'step'" in refusal(f"{USER_CODE}:NoStep", methods=("reset", "step"))
    assert "must be a class with reset and step" in refusal(f"{USER_CODE}:greet", methods=("reset", "step"))


def test_user_code_that_takes_too_long_to_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_pool, "START_TIMEOUT", 0.3)
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(1000)")
    assert "it took longer than 0.3 s" in refusal(f"{tmp_path}/mine.py:f")


def test_user_code_that_is_broken_while_it_is_used_fails_and_does_not_hang(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef f(x):\n  if x: os._exit(1)\n  return x")
    sandbox = Sandbox(f"{file}:f", {}, processes=1, timeout=10)
    assert sandbox.call(None, {"x": 0}).result(30) == 0
    file.write_text("import os\nf = 1 / 0")
    futures = [sandbox.call(None, {"x": x}) for x in (1, 0, 0)]
    for future in futures:
        failure = future.result(30)
        assert failure.kind == "died"
        assert "ZeroDivisionError" in failure.message
    sandbox.close()


# The end


@pytest.mark.parametrize("bad", ["sleep", "regex"])
def test_closing_is_prompt_and_leaves_no_call_unanswered(bad: str) -> None:
    sandbox = Sandbox(f"{USER_CODE}:behave", {}, processes=2, timeout=1000)
    sandbox.check()
    futures = [sandbox.call(None, {"what": bad}) for _ in range(10)]
    futures.append(sandbox.map([{"what": bad}, {"what": "good"}]))
    assert host_processes()
    started = time.monotonic()
    sandbox.close()
    assert time.monotonic() - started < 2
    assert not host_processes()
    closed = Failure("died", "the sandbox is closed")
    assert [future.result(0) for future in futures] == [closed] * 10 + [[closed, closed]]
    assert sandbox.call(None, {"what": "good"}).result(0) == closed
    sandbox.close()


def test_closing_at_once_waits_for_no_import(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(1000)")
    sandbox = Sandbox(f"{tmp_path}/mine.py:f", {}, processes=2, timeout=10)
    sandbox.close()
    assert not host_processes()
    with pytest.raises(JigsawError, match="closed"):
        sandbox.check()


@pytest.mark.parametrize("doing", ["good", "regex"])
def test_processes_end_with_a_parent_that_is_killed(doing: str) -> None:
    script = f"""
        import sys
        from jigsawrl.pipeline.sandbox import Sandbox
        sandbox = Sandbox("{USER_CODE}:announce", {{}}, processes=1, timeout=1000)
        sandbox.call(None, {{"what": "{doing}"}})
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stderr is not None
    with parent.stdin, parent.stderr:
        child = int(parent.stderr.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until_gone(child)


# Parts without processes


@given(st.text(), st.integers(0, 30))
def test_an_error_is_told_in_one_short_line(text: str, levels: int) -> None:
    def raise_below(levels: int) -> None:
        if levels:
            raise_below(levels - 1)
        raise ValueError(text)

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        raise_below(levels)
    line = sandbox_host.brief(caught.value)
    assert len(line) <= sandbox_host.MAX_ERROR
    assert len(line.splitlines()) == 1
    assert line.startswith("ValueError")
    assert "(test_sandbox.py:" in line
