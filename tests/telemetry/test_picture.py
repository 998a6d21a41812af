import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from jigsawrl.telemetry.columns import to_columns
from jigsawrl.telemetry.events import SUBSTAGES
from jigsawrl.telemetry.picture import bars, svg
from jigsawrl.telemetry.report import report
from jigsawrl.telemetry.timeline import Span

SVG = "{http://www.w3.org/2000/svg}"
PLOT = 1088

TWO_JOBS = [
    Span("decode", "long", (0, 1), 1, 100.0, 104.0),
    Span("tail", "long", (0,), 1, 104.0, 108.0, 0.25),
    Span("grad", "short", (0,), 1, 104.0, 108.0, 0.75),
    Span("tool", "short", (1,), 1, 104.0, 108.0),
]

Box = tuple[float, float, float, float]


def drawn(picture: str) -> dict[str, list[Box]]:
    """What is drawn over the bands by its hover text: (left, top, width, height) of each rectangle."""
    found = {}
    for path in ElementTree.fromstring(picture).iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        if title is not None:
            boxes = re.findall(r"M(\S+) (\S+?)h(\S+?)v(\S+?)h", path.attrib["d"])
            found[str(title.text)] = [(float(x), float(y), float(w), float(h)) for x, y, w, h in boxes]
    return found


def texts(picture: str) -> list[str]:
    return [str(text.text) for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def printed(
    spans: list[Span], workers: int, width: int, colour: bool = False, encoding: str = "utf-8"
) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=file,
        width=100,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        _environ={},
    )
    console.print(bars(spans, workers, width))
    file.flush()
    return re.sub(r"\x1b\[[\d;]*m", "", raw.getvalue().decode(encoding)).splitlines()


def test_bands_show_what_runs_as_high_as_its_share() -> None:
    half = PLOT / 2
    assert drawn(svg(TWO_JOBS, 2, "two jobs")) == {
        "long: decode": [(0, 1, half, 46), (0, 49, half, 46)],
        "long: tail": [(half, 35.5, half, 11.5)],
        "short: grad": [(half, 1, half, 34.5)],
    }


def test_a_picture_names_its_workers_pipelines_kinds_and_times() -> None:
    kinds = ["prefill", "decode", "tail", "logprob", "grad", "optim", "sync", "swap"]
    assert texts(svg(TWO_JOBS, 2, "two jobs")) == [
        *("two jobs", "height: share of the worker"),
        *("long", "short", *kinds, "idle"),
        *("worker 0", "worker 1"),
        *(f"{second} s" for second in range(9)),
    ]


def test_long_times_are_told_as_on_a_clock() -> None:
    picture = svg([Span("grad", "a", (0,), 1, 0, 3000)], 1, "long")
    assert texts(picture)[-11:] == [f"{5 * n}:00" for n in range(11)]


def test_a_picture_follows_the_readers_light_or_dark() -> None:
    assert "@media(prefers-color-scheme:dark)" in svg(TWO_JOBS, 2, "two jobs")


def test_pipelines_that_each_ask_for_all_of_a_worker_share_its_band() -> None:
    spans = [Span("grad", name, (0,), 1, 0, 1) for name in "ab"]
    assert drawn(svg(spans, 1, "")) == {"a: grad": [(0, 24, PLOT, 23)], "b: grad": [(0, 1, PLOT, 23)]}


def test_spans_below_a_pixel_become_their_mean() -> None:
    spans = [Span("decode", "a", (0,), 1, t, t + 0.5) for t in range(10 * PLOT)]
    [(left, _, _, height), *rest] = drawn(svg(spans, 1, ""))["a: decode"]
    assert left == 0
    assert height == pytest.approx(23, abs=1)
    assert len(rest) < 3


@given(st.text(), st.text())
def test_any_names_make_a_whole_document(title: str, name: str) -> None:
    picture = svg([Span("grad", name, (0,), 1, 0, 1)], 1, title)
    assert len(drawn(picture)) == 1


def test_a_picture_of_very_many_spans_stays_under_a_megabyte() -> None:
    rng = np.random.default_rng(0)
    t0 = rng.uniform(0, 3000, 200_000).tolist()
    picked = [rng.integers(0, n, len(t0)).tolist() for n in (len(SUBSTAGES), 16, 64)]
    spans = [
        Span(SUBSTAGES[kind], f"p{name}", (worker,), 1, t, t + 1, 0.5)
        for t, kind, name, worker in zip(t0, *picked, strict=True)
    ]
    picture = svg(spans, 64, "much")
    assert 100_000 < len(picture.encode()) < 1_000_000
    assert ElementTree.fromstring(picture).attrib["width"] == "1200"


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
def test_what_is_drawn_is_as_much_as_is_taken(spans: list[Span]) -> None:
    """To within the pixels at the edges of spans."""
    picture = svg(spans, 2, "")
    area = sum(w * h for boxes in drawn(picture).values() for _, _, w, h in boxes) / (46 * PLOT)
    taken = sum(worker.occupied for worker in report(spans, 2).workers)
    slack = (2 * len(spans) + 2) / PLOT + 0.03 * len({(s.pipeline, s.substage) for s in spans})
    assert area == pytest.approx(taken, abs=slack)
    assert all(0 <= x <= x + w <= PLOT and 0 < h <= 46 for bs in drawn(picture).values() for x, _, w, h in bs)


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
    assert drawn(svg([], 2, "nothing")) == {}
    assert printed([], 1, 20) == ["worker 0 ...........", "         0 s  0.00 s", ""]
    assert to_columns([], 2).pipelines == ()
