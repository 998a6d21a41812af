import json
import re
from pathlib import Path

import pytest
from run_folders import at, ran, run_folder
from test_page import Page
from test_page_in_browser import BROWSER, opened

from jigsawrl.telemetry.comparison import Compared, Comparison, Fate, comparison_page
from jigsawrl.telemetry.runreport import run_report


def fate(
    seconds: float,
    alone: float | None = 4.0,
    ended: str = "finished",
    same: bool | None = True,
    reason: str = "",
) -> Fate:
    return Fate(ended, reason, 2, seconds, alone, 400, 0.25, 0.5, same)


def compared(folder: Path, policy: str, seconds: float, ratio: float, **fates: Fate) -> Compared:
    """A run of this many seconds."""
    events = [
        at(-5, "start", workers=2),
        at(0, "predicted", pipeline="<a>", phase="rollout", step=1, seconds=1.0),
        ran("decode", "<a>", 0, 1, 0, seconds / 2, tokens=400),
        ran("grad", "b", 1, 1, seconds / 4, seconds, tokens=400),
    ]
    named = {"<a>" if name == "a" else name: one for name, one in fates.items()}
    return Compared(policy, run_report(run_folder(folder / policy, events)), seconds, ratio, named)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    serial = compared(tmp_path, "serial", 8.0, 1.0, a=fate(4.0), b=fate(8.0))
    other = compared(tmp_path, "jigsaw", 4.0, 2.0, a=fate(4.0), b=fate(6.0, same=False))
    return Comparison("night & day", 2, "serial", [serial, other])


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
    broken = compared(
        tmp_path, "rollmux", 1.0, 8.0, a=fate(1.0), b=fate(1.0, ended="failed", reason="no\nmore")
    )
    found = Comparison("night", 2, "serial", [*comparison.runs, broken]).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["best"], found["against"], found["simulated"]) == ("jigsaw", "serial", False)
    rollmux = found["policies"][2]
    assert (rollmux["ratio"], rollmux["mean_slowdown"], rollmux["setup_seconds"]) == (8.0, 0.25, 5.0)
    assert rollmux["pipelines"]["b"]["slowdown"] is None


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    alone = Comparison(
        "x", 2, "jigsaw", [compared(tmp_path, "jigsaw", 4.0, 1.0, a=fate(4.0, None, same=None))]
    )
    (run,) = alone.runs
    assert (run.mean_slowdown, run.worst_slowdown, run.rewards) == (None, None, "")
    assert "|jigsaw|4.0 s|100.0|1.00×|62%|Time until" in Page(comparison_page(alone)).sections["policies"]


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
