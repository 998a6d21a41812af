import io
import math
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from jigsawrl.telemetry.progress import Progress

VALUES = {
    "reward/mean": 0.84219,
    "perf/tokens": 9624,
    "timing_s/step": 2.0,
    "response_length/mean": 12.34,
    "actor/loss": -0.00123,
    "actor/kl": 0.0031,
}


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def screen(width: int = 80, terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=25,
        force_terminal=terminal,
        force_interactive=terminal,
        legacy_windows=False,
        highlight=False,
        _environ={},
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frame(progress: Progress, width: int = 80) -> list[str]:
    """The live display as it stands."""
    console = screen(width, terminal=False)
    console.print(progress)
    return [line.rstrip() for line in written(console).splitlines()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> Iterator[Progress]:
    with Progress(console=screen(), now=clock) as progress:
        yield progress


def test_a_pipeline_has_a_bar_and_its_figures_below(live: Progress, clock: Clock) -> None:
    live.start("arithmetic", 60)
    for step in range(1, 31):
        clock.time += 2
        live.update("arithmetic", step, {**VALUES, "reward/mean": step / 40})
    assert frame(live) == [
        "arithmetic ━━━━━━━━━━━━━━━━━━━━━━━━━                          30/60     eta 1:00",
        "  reward 0.750 ▁▂▃▄▅▆▇█  tokens/s 4,812  length 12.3  loss -0.0012  kl 0.0031",
    ]


def test_before_the_first_step_the_display_says_so(live: Progress, clock: Clock) -> None:
    live.start("arithmetic", 60)
    clock.time += 75
    bar, figures = frame(live)
    assert bar.startswith("arithmetic ")
    assert bar.endswith("0/60         1:15")
    assert figures == "  first step is running"


def test_a_resumed_pipeline_starts_where_it_was_and_its_pace_is_of_this_run(
    live: Progress, clock: Clock
) -> None:
    live.start("arithmetic", 100, done=90)
    clock.time += 3
    live.update("arithmetic", 91, VALUES)
    assert frame(live)[0].endswith("91/100     eta 0:27")


def test_bars_of_several_pipelines_line_up_at_80_columns(live: Progress) -> None:
    live.start("a", 10)
    live.start("a-pipeline-whose-name-is-far-too-long", 2000, done=1500)
    live.update("a", 10, VALUES)
    lines = frame(live)
    assert len(lines) == 4
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].index("━") == lines[2].index("━")
    assert lines[0].index("10/10") + len("10/10") == lines[2].index("1500/2000") + len("1500/2000")


@pytest.mark.parametrize("width", [20, 40, 60, 79, 200])
def test_figures_that_do_not_fit_are_left_out_whole(live: Progress, width: int) -> None:
    live.start("arithmetic", 60)
    live.update("arithmetic", 1, VALUES)
    bar, figures = frame(live, width)
    assert max(len(bar), len(figures)) <= min(width, 100)
    full = "  reward 0.842  tokens/s 4,812  length 12.3  loss -0.0012  kl 0.0031"
    assert full.startswith(figures)
    assert full.removeprefix(figures)[:2] in ("", "  ")


def test_numbers_that_are_not_finite_are_shown_as_they_are(live: Progress) -> None:
    live.start("arithmetic", 60)
    live.update("arithmetic", 1, {"reward/mean": math.nan, "actor/loss": math.inf})
    live.update("arithmetic", 2, {"reward/mean": math.nan, "actor/loss": math.inf})
    assert frame(live)[1].split() == ["reward", "nan", "loss", "inf"]


def test_markup_in_names_and_messages_is_just_text() -> None:
    console = screen()
    with Progress(console=console) as progress:
        progress.start("[red]x", 1)
        progress.message("reward of [bold]row [/] failed")
        assert "[red]x" in frame(progress)[0]
    assert "reward of [bold]row [/] failed" in written(console)


def test_the_terminal_is_given_back_when_the_body_raises() -> None:
    console = screen()
    progress = Progress(console=console)

    def fail() -> None:
        with progress:
            progress.start("arithmetic", 60)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert written(console).rfind("\x1b[?25h") > written(console).rfind("\x1b[?25l") >= 0
    progress.stop()


def test_without_a_terminal_there_is_one_line_a_second_with_the_first_and_the_last(clock: Clock) -> None:
    console = screen(terminal=False)
    with Progress(console=console, now=clock) as progress:
        progress.start("arithmetic", 30)
        for step in range(1, 31):
            clock.time += 0.25
            progress.update("arithmetic", step, VALUES)
    lines = written(console).splitlines()
    assert [line.split()[1] for line in lines] == [f"{n}/30" for n in (1, 5, 9, 13, 17, 21, 25, 29, 30)]
    figures = "reward 0.842  tokens/s 4,812  length 12.3  loss -0.0012  kl 0.0031"
    assert lines[1] == f"arithmetic 5/30  {figures}  eta 0:06"
    assert lines[-1] == f"arithmetic 30/30  {figures}"


def test_slow_steps_have_a_line_each_and_long_messages_are_not_broken(clock: Clock) -> None:
    console = screen(terminal=False)
    with Progress(console=console, now=clock) as progress:
        progress.start("a", 3)
        progress.message("x" * 200)
        for step in (1, 2, 3):
            clock.time += 60
            progress.update("a", step, {})
    assert written(console).splitlines() == ["x" * 200, "a 1/3  eta 2:00", "a 2/3  eta 1:00", "a 3/3"]


def test_without_a_terminal_a_line_says_what_is_under_way_where_nothing_was_printed_for_long(
    clock: Clock,
) -> None:
    console = screen(terminal=False)
    with Progress(console=console, now=clock) as progress:
        progress.doing("sums", 0, "set-up")
        progress.start("sums", 30)
        for passed in range(1, 121):
            clock.time += 1
            if 10 <= passed < 100:
                progress.doing("sums", 1, "generation", min(passed, 50), 50)
            if passed == 70:
                progress.message("a warning")
            if passed == 100:
                progress.update("sums", 1, {})
                progress.doing("sums", 2, "update")
            progress.beat()
    assert written(console).splitlines() == [
        "sums: step 1, generation for 0:20, 30 of 50 samples done",
        "sums: step 1, generation for 0:50, all 50 samples done but for their rewards",
        "a warning",
        "sums 1/30  eta 48:20",
    ]


def test_what_many_pipelines_are_at_is_one_line_and_who_waits_is_not_in_it(clock: Clock) -> None:
    console = screen(terminal=False)
    with Progress(console=console, now=clock) as progress:
        for number in range(9):
            progress.doing(f"p{number}", 1, "training")
            clock.time += 5
        progress.doing("p1", 1, "")
        for _ in range(3):
            progress.beat()
    assert written(console) == (
        "p0: step 1, training for 0:45; p2: step 1, training for 0:35; p3: step 1, training for 0:30; "
        "p4: step 1, training for 0:25; and 4 more\n"
    )


def test_a_terminal_gets_no_such_lines(clock: Clock) -> None:
    console = screen()
    progress = Progress(console=console, now=clock)
    progress.doing("sums", 1, "generation", 3, 400)
    clock.time += 3600
    progress.beat()
    assert written(console) == ""


SCRIPT = """
import sys
from jigsawrl.telemetry.progress import Progress
with Progress(json=sys.argv[1] == "json") as progress:
    progress.start("arithmetic", 2)
    progress.message("a warning")
    for step in (1, 2):
        progress.update("arithmetic", step, {"reward/mean": 0.5})
"""


def run_script(
    mode: str, stdout: int = subprocess.PIPE, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


def test_with_json_nothing_is_on_stdout_and_messages_are_on_stderr() -> None:
    result = run_script("json")
    assert (result.stdout, result.stderr) == ("", "a warning\n")


def test_a_pipe_gets_plain_lines_even_when_colours_are_forced() -> None:
    result = run_script("plain", FORCE_COLOR="1")
    assert (
        result.stdout == "a warning\narithmetic 1/2  reward 0.500  eta 0:00\narithmetic 2/2  reward 0.500\n"
    )
    assert result.stderr == ""


def test_a_real_terminal_gets_bars_with_messages_above_and_its_cursor_back() -> None:
    ours, theirs = pty.openpty()
    run_script("live", stdout=theirs, TERM="xterm", COLUMNS="80", LINES="25")
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\x1b[?25l" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    assert "━" in shown[shown.index("a warning") :]
    assert "2/2" in shown
