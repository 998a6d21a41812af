"""The page in a real browser: it runs without an error, answers to the pointer, and fits a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from run_folders import run_folder, two_pipelines

from jigsawrl.telemetry.runreport import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]
REWARDS = {"sums": [0.25, 0.5], "<search>": [0.125]}

USE = """
const found = {};
const $ = (what) => document.querySelector(what);
const at = (element, kind, x) => {
  const box = element.getBoundingClientRect();
  const where = { clientX: box.left + x * box.width, clientY: box.top + box.height / 2 };
  element.dispatchEvent(new PointerEvent(kind, { bubbles: true, pointerType: "mouse", button: 0, ...where }));
};
const tip = () => ($("#tip").hidden ? null : $("#tip").textContent);
const ticks = () => [...document.querySelectorAll(".tick")].map((tick) => tick.textContent);

found.sections = [...document.querySelectorAll("section")].map((one) => one.id);
found.rows = [...document.querySelectorAll(".row")].map((row) => row.dataset.who);
const tail = $('.row [data-kind="tail"]');
at(tail, "pointermove", 0.5);
found.tail = tip();
at($(".bubble path"), "pointermove", 0.5);
found.bubble = tip();
at($(".ticks"), "pointermove", 0.5);
found.away = tip();

found.before = ticks();
at($(".ticks"), "pointerdown", 0.2);
at($(".ticks"), "pointermove", 0.6);
found.dragging = $("#zoom").getBoundingClientRect().width > 0;
at($(".ticks"), "pointerup", 0.6);
found.zoomed = ticks();
at(tail, "pointermove", 0.5);
found.stillTail = tip();
$("#whole").click();
found.after = ticks();

const faded = () => [...document.querySelectorAll(".row.track")].filter((row) => row.style.opacity).length;
$('.tools [data-of="of1"]').click();
found.faded = faded();
$('.tools [data-of="of1"]').click();
found.unfaded = faded();
found.colours = [getComputedStyle(document.body).backgroundColor, getComputedStyle(tail).fill];
document.body.dataset.found = JSON.stringify(found);
"""


def opened(page: Path, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what was said on the console."""
    command = [
        *(str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--enable-logging=stderr"),
        *("--window-size=1200,900", "--virtual-time-budget=2000", *options, "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def used(folder: Path, *options: str) -> dict[str, Any]:
    """What is found on the page when it is used."""
    page = folder / "report.html"
    using = folder / "using.html"
    using.write_text(page.read_text().replace("</body>", f"<script>{USE}</script></body>"))
    document, console = opened(using, folder, *options)
    assert console == []
    (found,) = re.findall('data-found="(.*?)"', document)
    return dict(json.loads(html.unescape(found)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_folder(tmp_path, two_pipelines(), REWARDS)
    write_report(tmp_path)
    return tmp_path


def test_the_page_opens_without_an_error(folder: Path) -> None:
    document, console = opened(folder / "report.html", folder)
    assert console == []
    assert re.search(r'<div class="timeline"[^>]* data-ready=""', document)
    assert '<html lang="en" class="js">' in document


def test_the_page_answers_to_the_pointer(folder: Path) -> None:
    found = used(folder, "--blink-settings=preferredColorScheme=1")
    assert found["sections"] == [
        *("timeline-section", "workers", "throughput", "rewards", "predictions", "incidents"),
    ]
    assert found["rows"] == ["<search>", "sums", "bubble", "sums", "bubble", "<search>"]
    assert found["tail"] == "sums: tail, step 1\n4.000 s to 6.000 s, 2.000 s\n25 % of the worker"
    assert found["bubble"] == "bubble: tail\n4.000 s to 6.000 s, 2.000 s"
    assert found["away"] is None
    assert found["dragging"]
    assert found["zoomed"] == ["2 s", "2.5 s", "3 s", "3.5 s", "4 s", "4.5 s", "5 s", "5.5 s", "6 s"]
    assert found["stillTail"] == found["tail"]
    assert found["before"] == found["after"] == [f"{second} s" for second in range(11)]
    assert (found["faded"], found["unfaded"]) == (2, 0)


def test_the_page_is_dark_for_who_prefers_it(folder: Path) -> None:
    light = used(folder, "--blink-settings=preferredColorScheme=1")["colours"]
    dark = used(folder, "--blink-settings=preferredColorScheme=0")["colours"]
    assert (light[0], dark[0]) == ("rgb(251, 251, 250)", "rgb(15, 17, 20)")
    assert light[1] != dark[1]


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_of_the_page_stands_over_its_edge(width: int, folder: Path) -> None:
    source = html.escape((folder / "report.html").read_text(), quote=True)
    measure = (
        'const inner = document.querySelector("iframe").contentDocument.documentElement;'
        "document.body.dataset.found = JSON.stringify([inner.clientWidth, inner.scrollWidth]);"
    )
    frame = folder / "frame.html"
    frame.write_text(
        f'<body><iframe width="{width}" height="900" style="border:0" srcdoc="{source}"></iframe>'
        f"<script>onload = () => {{ {measure} }}</script></body>"
    )
    document, console = opened(frame, folder)
    assert console == []
    (found,) = re.findall('<body data-found="(.*?)"', document)
    clear, needed = json.loads(html.unescape(found))
    assert needed <= clear <= width
