import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from test_progress import VALUES, Clock, frame, screen, written

from jigsawrl.telemetry.board import Piece, PipelineLine, WorkerLine, board
from jigsawrl.telemetry.progress import Progress
from jigsawrl.telemetry.track import Track

PIPELINES = [PipelineLine("sums", 0.5), PipelineLine("calc", 0.0, "waiting")]
WORKERS = [
    WorkerLine(0, (Piece("sums", "grad"),), 0.872),
    WorkerLine(1, (Piece("sums", "tail", 0.25), Piece("calc", "decode", 0.75, paused=True)), 1.0),
]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> Iterator[Progress]:
    with Progress(console=screen(), now=clock) as progress:
        progress.standing(PIPELINES, WORKERS)
        yield progress


def test_there_is_a_line_for_each_pipeline_and_each_worker(live: Progress, clock: Clock) -> None:
    live.start("sums", 6)
    live.start("calc", 60)
    for step in (1, 2, 3):
        clock.time += 2
        live.update("sums", step, {**VALUES, "reward/mean": step / 4})
    assert frame(live) == [
        "pipeline                   step   reward           tokens/s  share          left",
        "sums      ━━━━━━━━━━━━━━    3/6    0.750 ▁▅█          4,812  50%            0:06",
        "calc      ━━━━━━━━━━━━━━   0/60                              waiting        0:06",
        "",
        "worker 0   87% busy  sums: grad",
        "worker 1  100% busy  sums: tail 25%, calc: decode paused",
    ]


def test_pipelines_are_shown_before_they_begin(live: Progress) -> None:
    live.standing([PipelineLine("sums", 0.0, "set-up")], [WorkerLine(0, (), 0.0)])
    assert frame(live)[1:] == [
        f"sums      {'━' * 14}{'':37}set-up",
        "",
        "worker 0    0% busy  idle",
    ]


def test_one_that_failed_says_why_as_far_as_there_is_room(live: Progress) -> None:
    live.start("sums", 6)
    live.update("sums", 2, VALUES)
    reason = "the reward of row 17 fell over and could not get up again"
    live.standing([PipelineLine("sums", 0.0, f"failed: {reason}")], [])
    line = frame(live)[1]
    assert "failed: the reward" in line
    assert len(line) <= 80


def test_a_pipeline_that_comes_back_keeps_its_course(live: Progress) -> None:
    live.start("sums", 6)
    for step in (1, 2, 3):
        live.update("sums", step, {"reward/mean": step / 4})
    live.start("sums", 6, done=2)
    line = frame(live)[1]
    assert "2/6    0.750 ▁▅█" in line


@pytest.mark.parametrize("width", [30, 45, 60, 80, 100, 200])
def test_lines_fit_any_width(live: Progress, width: int) -> None:
    live.start("sums", 6)
    live.start("calc", 2000, done=1500)
    live.update("sums", 3, VALUES)
    lines = frame(live, width)
    assert max(map(len, lines)) <= min(width, 100)
    assert lines[1].startswith("sums")


def test_without_more_than_ascii_there_is_no_more(clock: Clock) -> None:
    track = Track("sums", 6, 3, 1000.0, rewards=[0.1, 0.2], figures={"reward": 0.2})
    track.stamps.append((3, 1000.0))
    names = [PipelineLine("sums" * 10)]
    lines = [line.plain for line in board({names[0].name: track}, names, WORKERS, 1001.0, 80, plain=True)]
    assert all(line.isascii() for line in lines)
    assert "..." in lines[1]


def test_of_many_workers_the_first_are_shown_and_the_rest_together(live: Progress) -> None:
    live.standing(PIPELINES, [WorkerLine(number, (), 0.5) for number in range(64)])
    lines = frame(live)
    assert len(lines) == 1 + 2 + 1 + 16
    assert lines[-1] == "49 more     50% busy"


def test_markup_in_names_is_just_text(live: Progress) -> None:
    live.standing([PipelineLine("[red]x")], [WorkerLine(0, (Piece("[red]x", "grad"),), 0.5)])
    assert frame(live)[1].startswith("[red]x")
    assert "[red]x: grad" in frame(live)[3]


@pytest.mark.parametrize("json", [False, True])
def test_without_a_terminal_nothing_of_it_is_shown(json: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=json, force_interactive=json, _environ={})
    with Progress(console=console, json=json) as progress:
        progress.standing(PIPELINES, WORKERS)
        assert not progress.on_terminal
    assert written(console) == ""


def test_a_terminal_sees_it_at_once_and_gets_its_cursor_back() -> None:
    console = screen()
    with Progress(console=console) as progress:
        progress.standing(PIPELINES, WORKERS)
        progress.message("a warning")
    shown = written(console)
    assert "worker 1" in shown[shown.index("a warning") :]
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0
