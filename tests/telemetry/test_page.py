import json
import re
import time
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from cli_helpers import Case, outcomes_of, without_torch
from hypothesis import given
from hypothesis import strategies as st
from run_folders import Event, T, at, ran, run_folder, two_pipelines

from jigsawrl.errors import JigsawError
from jigsawrl.telemetry.axes import log_ticks, ticks, time_ticks
from jigsawrl.telemetry.bands import bands_of, ranges, timeline
from jigsawrl.telemetry.charts import smoothed, thinned
from jigsawrl.telemetry.columns import to_columns
from jigsawrl.telemetry.runreport import run_report, write_report
from jigsawrl.telemetry.timeline import Span

REWARDS = {"sums": [0.25, 0.5], "<search>": [0.125]}


class Page(HTMLParser):
    """The text of each section, and that every element is closed."""

    VOID = frozenset({"meta"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.titles: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if tag not in self.VOID:
            self._open.append((tag, said.get("id")))
        if said.get("title"):
            self.titles.append(str(said["title"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        where = next((name for tag, name in self._open if tag == "section"), None)
        if self._open and self._open[-1][0] == "title":
            self.titles.append(data)
        elif where is not None and data.strip():
            self.sections[where] = f"{self.sections.get(where, '')}|{data.strip()}"


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


def test_a_page_tells_what_happened(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, two_pipelines(), REWARDS))
    said = page.sections
    assert list(said) == ["timeline-section", "workers", "throughput", "rewards", "predictions", "incidents"]
    assert "|worker 0|100% busy|" in said["timeline-section"]
    assert "|worker 1|60% busy|" in said["timeline-section"]
    assert "|off the workers|tools, rewards|" in said["timeline-section"]
    assert said["workers"].startswith(
        "|Where the workers' time went|busy|tail|dependency|all|80% busy|worker 0|"
    )
    assert said["throughput"] == (
        "|Throughput and slowdown"
        "|pipeline|steps|s/step|tokens|tokens/s|slowdown|reward|its time goes to"
        "|<search>|1|8.000|0|0.125 → 0.125|waiting 50%, tool 25%, grad 25%"
        "|sums|2|5.000|808|81|1.25×|0.250 → 0.500|decode 40%, grad 40%, tail 20%"
        "|all|3|808|81"
    )
    assert "|Over time|" in said["rewards"]
    assert "|Over steps|" in said["rewards"]
    assert said["predictions"].endswith("|off by|sums|rollout|1|4.0 s|5.0 s|25%")
    assert said["incidents"] == (
        "|Failures and recoveries|time|pipeline|what|reason"
        "|0:06|<search>|died|actor of worker 1: signal 9 & no more"
        "|0:07|<search>|recovered|step 1"
    )


def test_set_up_is_a_sentence_and_no_time_of_the_workers(tmp_path: Path) -> None:
    first = at(-6.8, "start", name="night", workers=2, policy="jigsaw")
    folder = run_folder(tmp_path, [first, *two_pipelines()[1:]], REWARDS)
    assert "set-up took 6.8 s" in write_report(folder).read_text()
    made = run_report(folder)
    assert (made.report.seconds, made.report.busy_fraction) == (10.0, 0.8)
    assert made.as_dict()["setup_seconds"] == pytest.approx(6.8)
    assert next(made.notes()) == "set-up took 6.8 s"


def test_a_pointer_on_anything_finds_a_title(tmp_path: Path) -> None:
    titles = page_of(run_folder(tmp_path, two_pipelines(), REWARDS)).titles
    assert {
        "sums: tail",
        "<search>: tool",
        "bubble: tail",
        "0:06 <search>: died: actor of worker 1: signal 9 & no more",
        "sums, step 2: 0.500",
        "sums, 0:10: 0.250",
        "sums, rollout of step 1: predicted 4.0 s, took 5.0 s",
        "busy: 60.0%",
    } <= set(titles)


def test_what_is_not_known_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    said = page_of(run_folder(tmp_path, [ran("grad", "a", 0, 1, 0, 2)])).sections
    assert "slowdown" not in said["throughput"]
    assert said["rewards"].startswith("|Rewards|No rewards: ")
    assert said["predictions"].startswith("|Predicted against happened|No predictions: ")
    assert said["incidents"] == "|Failures and recoveries|Nothing failed."


def test_of_a_long_reason_the_page_shows_one_line_and_unfolds_the_rest(tmp_path: Path) -> None:
    reason = "Traceback (most recent call last):\n  File here\nValueError: <no>"
    folder = run_folder(tmp_path, [at(3, "start"), at(5, "failed", pipeline="a", reason=reason)])
    page = page_of(folder)
    assert page.sections["incidents"].endswith(f"|0:02|a|failed|ValueError: <no>|{reason}")


def test_a_run_that_has_only_started_has_a_page(tmp_path: Path) -> None:
    said = page_of(run_folder(tmp_path, [at(0, "start", pipeline="a", step=0)])).sections
    assert said["timeline-section"] == "|Timeline|No sub-stage has run yet."


def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing_of_its_log(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src="x" onerror="alert(2)">'
    events = [
        *two_pipelines(),
        ran("grad", evil, 0, 1, 10, 11),
        at(11, "failed", pipeline=evil, reason=evil),
        at(11, "action", action=evil),
        at(11, "predicted", pipeline=evil, phase=evil, step=1, seconds=1),
        at(11, "phase", pipeline=evil, phase=evil, step=1, t0=T, t1=T + 1),
    ]
    source = write_report(run_folder(tmp_path, events)).read_text()
    assert len(re.findall("<script", source)) == 2
    assert not re.findall(r"<(?:img|link|iframe|object|embed)\b|\bsrc=[\"']|@import|url\(|https?:", source)
    Page(source)


def test_the_timeline_beside_the_page_is_the_same_run(tmp_path: Path) -> None:
    write_report(run_folder(tmp_path, two_pipelines()))
    trace = json.loads((tmp_path / "timeline.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"pipelines", "worker 0", "worker 1"}


def test_a_report_that_fails_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", two_pipelines())
    before = write_report(folder).read_bytes()
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"t": 1, "event": "substage"}\n')
    with pytest.raises(JigsawError):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "report.html", "timeline.json"]


def test_a_hundred_thousand_spans_make_a_small_page_soon(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    clocks = np.zeros(16)
    events = [at(0, "start", name="big", workers=16)]
    for index in range(100_000):
        worker, lasts = int(random.integers(16)), float(random.exponential(0.3))
        kind = ("prefill", "decode", "tail", "grad", "sync")[random.integers(5)]
        t0 = float(clocks[worker])
        clocks[worker] += 1.2 * lasts
        name = f"p{random.integers(8)}"
        events.append(ran(kind, name, worker, index // 1000, t0, t0 + lasts, share=0.5))
    events += [at(float(clocks.max()), "warning", pipeline="p0", text=f"warning {n}") for n in range(5000)]
    events.append(at(float(clocks.max()), "end"))
    folder = run_folder(tmp_path, events, {f"p{n}": random.random(2000).tolist() for n in range(8)})
    start = time.process_time()
    page = write_report(folder)
    assert time.process_time() - start < 20
    assert page.stat().st_size < 5_000_000
    assert "And 4,800 more in events.jsonl." in page.read_text()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def almost_events(draw: st.DrawFn) -> Event:
    """An event of any kind with some of its fields replaced by anything, or left out."""
    event = dict(draw(st.sampled_from(two_pipelines())))
    for name in draw(st.sets(st.sampled_from([*event, "workers", "share", "solo", "scene", "error"]))):
        if draw(st.booleans()):
            event[name] = draw(JSON)
        else:
            event.pop(name, None)
    return event


@given(almost_events())
def test_any_object_in_a_log_is_reported_or_named_as_no_event(event: Event) -> None:
    with TemporaryDirectory() as name:
        folder = run_folder(Path(name), [event])
        with suppress(JigsawError):
            Page(write_report(folder).read_text())
            return
        with pytest.raises(JigsawError, match=r"events\.jsonl, line 1 is "):
            write_report(folder)


def spent(source: str) -> dict[str, float]:
    """How much of the cells of all tracks is filled by each class, where a whole track is 1."""
    found: dict[str, float] = {}
    for css, path in re.findall(r'<path class="(\S+)"[^>]* d="(.*?)"', source):
        boxes = re.findall(r"M\S+ \S+?h(\S+?)v(\S+?)h", path)
        found[css] = found.get(css, 0.0) + sum(float(w) * float(h) for w, h in boxes) / 1000
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["decode", "tail", "grad", "sync"]),
            st.sampled_from("ab"),
            st.integers(0, 3),
            st.sampled_from([0.25, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_second_is_drawn_as_long_and_as_high_as_it_was(
    drawn: list[tuple[str, str, int, float]],
) -> None:
    spans = [
        Span(kind, name, (worker,), 1, index, index + 1, share)  # type: ignore[arg-type]
        for index, (kind, name, worker, share) in enumerate(drawn)
    ]
    source = "".join(timeline(to_columns(spans, 4), {}, {"a": 0, "b": 1}, []))
    cells = int(re.search(r'data-cells="(\d+)"', source).group(1))  # type: ignore[union-attr]
    found = spent(source)
    for kind in {kind for kind, *_ in drawn}:
        seconds = sum(share for other, _, _, share in drawn if other == kind)
        assert found[f"k-{kind}"] == pytest.approx(seconds / len(spans) * cells, abs=len(spans))


def test_workers_that_do_the_same_are_one_band() -> None:
    spans = [
        Span("decode", "a", (0, 1, 4), 1, 0, 4),
        Span("grad", "b", (2,), 1, 0, 4),
    ]
    assert [band.name for band in bands_of(to_columns(spans, 6))] == [
        "workers 0–1, 4",
        "worker 2",
        "workers 3, 5",
    ]


@given(st.sets(st.integers(0, 20)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    named = [part.split("–") for part in ranges(sorted(numbers)).split(", ") if part]
    assert [n for part in named for n in range(int(part[0]), int(part[-1]) + 1)] == sorted(numbers)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 10)), max_size=50), st.integers(1, 20))
def test_a_thinned_curve_keeps_its_mean_and_is_short(points: list[tuple[float, float]], most: int) -> None:
    kept = thinned(points, most)
    assert len(kept) == min(most, len(points))
    if points and len(points) % len(kept) == 0:
        assert np.mean([y for _, y in kept]) == pytest.approx(np.mean([y for _, y in points]), abs=1e-6)


@given(st.lists(st.floats(-10, 10), max_size=30), st.integers(0, 5))
def test_a_smoothed_curve_stays_within_and_keeps_its_ends(values: list[float], window: int) -> None:
    calm = smoothed(values, window)
    assert len(calm) == len(values)
    if values:
        assert min(values) - 1e-6 <= min(calm) <= max(calm) <= max(values) + 1e-6
        assert (calm[0], calm[-1]) == pytest.approx((values[0], values[-1]))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_within(low: float, width: float) -> None:
    high = low + width
    room = 1e-6 * (abs(low) + width)
    found = ticks(low, high, 5)
    assert len(found) <= 6
    assert all(low - room <= value <= high + room for value, _ in found)


@given(st.floats(1e-4, 1e4), st.floats(20, 1e5))
def test_ticks_of_a_logarithmic_axis_are_within(low: float, times: float) -> None:
    found = [value for value, _ in log_ticks(low, low * times)]
    assert found
    assert all(low * 0.999 <= value <= low * times * 1.001 for value in found)


def test_ticks_of_time_are_round() -> None:
    assert time_ticks(0.0, 5) == []
    assert [label for _, label in time_ticks(1.1, 5)] == ["0 s", "0.5 s", "1 s"]
    assert [label for _, label in time_ticks(5400, 4)] == ["0:00", "30:00", "1:00:00", "1:30:00"]


EVENTS = "".join(json.dumps(event) + "\n" for event in two_pipelines())
FILES = (
    ("night/events.jsonl", EVENTS),
    ("empty/notes.txt", ""),
    ("torn/events.jsonl", EVENTS[:-20]),
    ("bad/events.jsonl", EVENTS + "what?\n"),
)
CASES = {
    "nowhere": Case("report nowhere", 2, "jigsaw: nowhere: there is no such run folder\n"),
    "empty": Case(
        "report empty", 2, "jigsaw: empty: holds no events.jsonl, so it is not the folder of a run\n"
    ),
    "bad": Case(
        "report bad --json",
        2,
        "jigsaw: bad/events.jsonl, line 20 is not a JSON object; remove that line\n",
    ),
    "torn": Case("report torn", 0, "", None),
    "table": Case("report night", 0, "", None),
    "json": Case("report night --json", 0, "", None),
}


def test_the_command_makes_the_page_or_says_why_not(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = outcomes_of(CASES, FILES, tmp_path_factory, without_torch(tmp_path_factory))
    assert {name: (one.code, one.stderr) for name, one in found.items()} == {
        name: (case.code, case.stderr) for name, case in CASES.items()
    }
    assert {name: one.written for name, one in found.items()} == {
        "nowhere": set(),
        "empty": set(),
        "bad": set(),
        "torn": {"torn/report.html", "torn/timeline.json"},
        **{name: {"night/report.html", "night/timeline.json"} for name in ("table", "json")},
    }
    assert [line for line in found["table"].stdout.splitlines() if line[:1] not in "│╭╰ "] == [
        "0:06 <search> died: actor of worker 1: signal 9 & no more",
        "written: night/report.html and timeline.json",
    ]
    said = json.loads(found["json"].stdout)
    assert said["page"] == str(found["json"].folder / "night" / "report.html")
    assert (said["report"]["tokens"], said["slowdowns"]) == (808, {"sums": 2.5})
