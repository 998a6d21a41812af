import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import at, ran, run_folder
from test_page import Page
from test_page_in_browser import BROWSER, opened

from jigsawrl.config.pipelines import load_mix
from jigsawrl.simulator.compare import compared
from jigsawrl.simulator.from_config import scene_of
from jigsawrl.telemetry.comparison import Comparison, Fate, Side
from jigsawrl.telemetry.comparison_page import comparison_page
from jigsawrl.telemetry.runreport import run_report


def fate(
    seconds: float,
    alone: float | None = 4.0,
    ended: str = "finished",
    same: bool | None = True,
    reason: str = "",
) -> Fate:
    return Fate(ended, reason, 2, seconds, alone, 400, 0.25, 0.5, same)


def side(folder: Path, policy: str, seconds: float, **fates: Fate) -> Side:
    """A run of this many seconds."""
    events = [
        at(-5, "start", workers=2),
        at(0, "predicted", pipeline="<a>", phase="rollout", step=1, seconds=1.0),
        ran("decode", "<a>", 0, 1, 0, seconds / 2, tokens=400),
        ran("grad", "b", 1, 1, seconds / 4, seconds, tokens=400),
    ]
    named = {"<a>" if name == "a" else name: one for name, one in fates.items()}
    made = run_report(run_folder(folder / policy, events))
    return Side(policy, made.log, made.report, named)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    serial = side(tmp_path, "serial", 8.0, a=fate(4.0), b=fate(8.0))
    other = side(tmp_path, "jigsaw", 4.0, a=fate(4.0), b=fate(6.0, same=False))
    return Comparison("night & day", 2, serial, [serial, other])


def test_the_page_holds_policies_against_each_other(comparison: Comparison) -> None:
    page = Page(comparison_page(comparison))
    said = page.sections
    assert list(said) == ["policies", "workers", "timelines", "pipelines"]
    assert said["policies"].startswith(
        "|Policies|policy|time|tokens/s|vs serial|slowdown|worst|busy|rewards"
        "|serial|8.0 s|100.0|1.00×|1.50×|2.00×|62%|equal"
        "|jigsaw|best|4.0 s|200.0|2.00×|1.25×|1.50×|62%|differ: b"
        "|Time until all were done|serial|8.0 s|jigsaw|4.0 s|Tokens a second"
    )
    assert "|serial|62% busy|jigsaw|62% busy" in said["workers"]
    assert said["timelines"].index("|serial, 8.0 s|") < said["timelines"].index("|jigsaw, 4.0 s|")
    assert "|<a>|serial|4.0 s|4.0 s|1.00×|0.250|0.500|finished|<a>|jigsaw|" in said["pipelines"]


def test_a_second_is_as_long_in_every_timeline(comparison: Comparison) -> None:
    text = comparison_page(comparison)
    assert text.index('id="timeline-serial"') < text.index("--part:1.0000")
    assert text.index('id="timeline-jigsaw"') < text.index("--part:0.5000")


def test_the_page_needs_nothing_else(comparison: Comparison) -> None:
    text = comparison_page(comparison)
    assert "default-src 'none'" in text
    assert not any(what in text for what in (" src=", "<link", "url(", "@import", "<script"))
    assert "<a>" not in text.replace('<a href="', "")
    assert 'href="jigsaw/report.html"' in text


def test_figures_are_json_and_the_best_is_whole(comparison: Comparison, tmp_path: Path) -> None:
    broken = side(tmp_path, "rollmux", 1.0, a=fate(1.0), b=fate(1.0, ended="failed", reason="no\nmore"))
    found = Comparison("night", 2, comparison.baseline, [*comparison.runs, broken]).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["best"], found["against"], found["simulated"]) == ("jigsaw", "serial", False)
    rollmux = found["policies"][2]
    assert (rollmux["ratio"], rollmux["mean_slowdown"], rollmux["setup_seconds"]) == (8.0, 0.25, 5.0)
    assert rollmux["pipelines"]["b"]["slowdown"] is None


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    run = side(tmp_path, "jigsaw", 4.0, a=fate(4.0, None, same=None))
    alone = Comparison("x", 2, run, [run])
    assert (run.mean_slowdown, run.worst_slowdown, run.rewards) == (None, None, "")
    assert "|jigsaw|4.0 s|100.0|1.00×|62%|Time until" in Page(comparison_page(alone)).sections["policies"]


def test_of_equals_the_best_is_the_one_that_slows_pipelines_down_least(tmp_path: Path) -> None:
    early, late = (
        side(tmp_path, name, 8.0, a=fate(seconds)) for name, seconds in (("rlix", 4.0), ("greedy", 6.0))
    )
    assert [Comparison("x", 2, late, runs).best for runs in ([early, late], [late, early])] == ["rlix"] * 2


@pytest.mark.parametrize(
    ("asked", "ended", "kept"),
    [
        ({}, "finished", None),
        ({"max_slowdown": 2.0}, "finished", True),
        ({"max_slowdown": 1.9}, "finished", False),
        ({"deadline": 8.0, "max_slowdown": 1.9}, "finished", False),
        ({"deadline": 7.9}, "finished", False),
        ({"deadline": 8.0}, "failed", False),
        ({"max_slowdown": 2.0}, "failed", None),
    ],
)
def test_what_was_asked_of_a_pipeline_was_kept_or_not(
    asked: dict[str, float], ended: str, kept: bool | None
) -> None:
    assert replace(fate(8.0, ended=ended), **asked).kept is kept


def test_a_simulated_side_says_what_a_real_one_says(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text("pipelines: {a: {workload: gsm8k_qwen3-4b, steps: 2}}\nworkers: 4\n")
    scene = scene_of(load_mix(tmp_path / "mix.yaml"))
    simulated, real = compared(scene, ["serial"]).as_dict(), comparison.as_dict()
    assert (simulated["simulated"], simulated["against"], simulated["best"]) == (True, "serial", "serial")
    (one,), other = simulated["policies"], real["policies"][0]
    assert (simulated.keys(), one.keys()) == (real.keys(), other.keys())
    assert one["pipelines"]["a"].keys() == other["pipelines"]["b"].keys()
    assert one["ratio"] == one["throughput_vs_serial"] == one["mean_slowdown"] == 1.0


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_a_browser_opens_the_page_without_an_error_and_at_one_scale(
    comparison: Comparison, tmp_path: Path
) -> None:
    measure = (
        "const wide = (of) => document.querySelector(`#timeline-${of} .row svg`).getBoundingClientRect().width;"
        "document.body.dataset.found = wide('jigsaw') / wide('serial');"
    )
    text = comparison_page(comparison).replace("</body>", f"<script>{measure}</script></body>")
    (tmp_path / "compare.html").write_text(text)
    document, console = opened(tmp_path / "compare.html", tmp_path)
    assert console == []
    (found,) = re.findall('data-found="(.*?)"', document)
    assert float(found) == pytest.approx(0.5, abs=0.01)
