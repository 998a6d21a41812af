import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from jigsawrl.telemetry.columns import to_columns
from jigsawrl.telemetry.events import SUBSTAGES
from jigsawrl.telemetry.picture import Lines, svg
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.timeline import Span

PLOT = 940
SVG = "{http://www.w3.org/2000/svg}"

TWO_JOBS = [
    Span("decode", "long", (0, 1), 1, 100.0, 104.0),
    Span("tail", "long", (0,), 1, 104.0, 108.0, 0.25),
    Span("grad", "short", (0,), 1, 104.0, 108.0, 0.75),
    Span("tool", "short", (1,), 1, 104.0, 108.0),
]

Box = tuple[float, float, float, float]


def picture(spans: list[Span], workers: int, title: str = "") -> str:
    log = RunLog(
        "run", workers, start=0.0 if not spans else math.inf, end=0.0 if not spans else -math.inf, spans=spans
    )
    return svg([(title, log)])


def tracks(drawing: str) -> list[dict[str, list[Box]]]:
    """What is on each track by its hover text: (left, bottom, width, height), each as a part of the whole track."""
    found = []
    for track in ElementTree.fromstring(drawing).iterfind(f"{SVG}svg/{SVG}svg"):
        wide, tall = map(float, track.attrib["viewBox"].split()[2:])
        boxes = {}
        for path in track.iterfind(f"{SVG}path"):
            pieces = re.findall(r"M(\S+) (\S+?)h(\S+?)v(\S+?)h", path.attrib["d"])
            numbers = [tuple(map(float, piece)) for piece in pieces]
            title = str(path.findtext(f"{SVG}title"))
            boxes[title] = [(x / wide, 1 - (y + h) / tall, w / wide, h / tall) for x, y, w, h in numbers]
        found.append(boxes)
    return found


def drawn(drawing: str) -> dict[str, list[Box]]:
    """What is on all tracks."""
    return {title: boxes for track in tracks(drawing) for title, boxes in track.items()}


def texts(drawing: str) -> list[str]:
    return [str(text.text) for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def printed(
    spans: list[Span], workers: int, width: int, colour: bool = False, encoding: str = "utf-8"
) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        _environ={},
    )
    console.print(Lines(to_columns(spans, workers)))
    file.flush()
    return re.sub(r"\x1b\[[\d;]*m", "", raw.getvalue().decode(encoding)).splitlines()


def test_a_track_shows_what_a_pipeline_runs_as_high_as_its_share_and_why_the_worker_is_not_busy() -> None:
    half = pytest.approx(0.5, abs=0.001)
    assert tracks(picture(TWO_JOBS, 2)) == [
        {"long: decode": [(0, 0, half, 1)], "long: tail": [(half, 0, half, 0.25)]},
        {"short: grad": [(half, 0, half, 0.75)]},
        {},
        {"long: decode": [(0, 0, half, 1)]},
        {"bubble: tail": [(half, 0, half, 1)]},
        {"short: tool": [(half, 0, half, 1)]},
    ]


def test_a_picture_names_its_workers_pipelines_kinds_and_times() -> None:
    assert texts(picture(TWO_JOBS, 2, "two jobs")) == [
        "two jobs",
        *("decode", "tail", "grad", "tool"),
        *("worker 0", "100% busy", "long", "short"),
        *("worker 1", "50% busy", "long"),
        *("off the workers", "tools, rewards", "short"),
        *(f"{second} s" for second in range(9)),
    ]


def test_long_times_are_told_as_on_a_clock() -> None:
    found = picture([Span("grad", "a", (0,), 1, 0, 3000)], 1)
    assert texts(found)[-11:] == [f"{5 * n}:00" for n in range(11)]


def test_a_picture_follows_the_readers_light_or_dark() -> None:
    assert "@media(prefers-color-scheme:dark)" in picture(TWO_JOBS, 2)


def test_timelines_are_stacked_and_a_second_is_as_long_in_all_of_them() -> None:
    logs = [RunLog("run", 1, spans=[Span("grad", "a", (0,), 1, 0, seconds)]) for seconds in (8, 2)]
    charts = ElementTree.fromstring(svg([("slow", logs[0]), ("fast", logs[1])])).findall(f"{SVG}svg")
    assert [str(chart.findtext(f"{SVG}title")) for chart in charts] == ["slow", "fast"]
    assert charts[1].attrib["y"] == charts[0].attrib["height"]
    slow, fast = (float(next(chart.iterfind(f"{SVG}svg")).attrib["width"]) for chart in charts)
    assert fast == pytest.approx(slow / 4, abs=0.1)


def test_spans_below_a_pixel_become_their_mean() -> None:
    spans = [Span("decode", "a", (0,), 1, t, t + 0.5) for t in range(10 * PLOT)]
    [(left, _, _, height), *rest] = drawn(picture(spans, 1))["a: decode"]
    assert left == 0
    assert height == pytest.approx(0.5, abs=0.03)
    assert len(rest) < 3


@given(st.text(), st.text())
def test_any_names_make_a_whole_document(title: str, name: str) -> None:
    assert len(drawn(picture([Span("grad", name, (0,), 1, 0, 1)], 1, title))) == 1


def test_a_picture_of_very_many_spans_stays_small() -> None:
    rng = np.random.default_rng(0)
    t0 = rng.uniform(0, 3000, 200_000).tolist()
    picked = [rng.integers(0, n, len(t0)).tolist() for n in (len(SUBSTAGES), 16, 64)]
    spans = [
        Span(SUBSTAGES[kind], f"p{name}", (worker,), 1, t, t + 1, 0.5)
        for t, kind, name, worker in zip(t0, *picked, strict=True)
    ]
    found = picture(spans, 64, "much")
    assert 100_000 < len(found.encode()) < 2_500_000
    assert ElementTree.fromstring(found).attrib["width"] == "1200"


@st.composite
def any_spans(draw: st.DrawFn) -> list[Span]:
    def span() -> Span:
        t0 = draw(st.floats(0, 100, allow_subnormal=False))
        return Span(
            draw(st.sampled_from(SUBSTAGES)),
            draw(st.sampled_from("abc")),
            (draw(st.integers(0, 1)),),
            1,
            t0,
            t0 + draw(st.floats(0, 30, allow_subnormal=False)),
            draw(st.floats(0, 1, allow_subnormal=False)),
        )

    return [span() for _ in range(draw(st.integers(0, 12)))]


@given(any_spans())
@example([Span("prefill", "a", (0,), 1, 0.0, 2.225073858507203e-309, 0.0, {})])
def test_whatever_ran_is_drawn_and_within_its_track(spans: list[Span]) -> None:
    boxes, room = drawn(picture(spans, 2)), 1 + 1e-9
    assert all(
        x >= 0 and x + w <= room and y >= 0 and y + h <= room for one in boxes.values() for x, y, w, h in one
    )
    whole = max((span.t1 for span in spans), default=0.0) - min((span.t0 for span in spans), default=0.0)
    long = [span for span in spans if span.share > 0.1 and span.t1 - span.t0 > whole / 100]
    if len({(span.pipeline, span.workers) for span in spans}) == len(spans):  # each has its track
        assert {f"{span.pipeline}: {span.substage}" for span in long} <= boxes.keys()


def test_a_terminal_without_colours_names_pipelines_by_letters() -> None:
    assert printed(TWO_JOBS, 2, 25) == [
        "worker 0 AAAAAAAABBBBBBBB",
        "worker 1 AAAAAAAA........",
        "         0 s        8.0 s",
        "A long  B short",
    ]
    assert printed(TWO_JOBS, 2, 25, encoding="ascii") == printed(TWO_JOBS, 2, 25)


def test_a_terminal_with_colours_shows_how_much_is_taken() -> None:
    spans = [*TWO_JOBS[:2], Span("grad", "short", (1,), 1, 105.0, 108.0)]
    assert [line.rstrip() for line in printed(spans, 2, 25, colour=True)] == [
        "worker 0 ████████▂▂▂▂▂▂▂▂",
        "worker 1 ████████  ██████",
        "         0 s        8.0 s",
        "█ long  █ short",
    ]


def test_a_run_without_spans_is_drawn_empty() -> None:
    assert drawn(picture([], 2, "nothing")) == {}
    assert printed([], 1, 20) == ["worker 0 ...........", "         0 s  0.00 s", ""]
    assert to_columns([], 2).pipelines == ()
