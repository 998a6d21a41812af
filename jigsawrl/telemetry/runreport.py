"""`report.html` and `timeline.json` of a run folder: for the end of a run, and for `jigsaw report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.logreader import read_run
from jigsawrl.telemetry.page import LEAST_SETUP, page
from jigsawrl.telemetry.report import Report, report
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.sections import slowdowns
from jigsawrl.telemetry.text import clock, duration
from jigsawrl.telemetry.timeline import chrome_trace

PAGE_FILE = "report.html"
TIMELINE_FILE = "timeline.json"
_MOST_FAILURES = 5


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run folder, read and added up."""

    folder: Path
    log: RunLog
    report: Report

    @property
    def page(self) -> Path:
        return self.folder / PAGE_FILE

    @property
    def timeline(self) -> Path:
        return self.folder / TIMELINE_FILE

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable."""
        return {
            "name": self.log.name,
            "page": str(self.page.absolute()),
            "timeline": str(self.timeline.absolute()),
            "setup_seconds": self.log.setup,
            "report": self.report.as_dict(),
            "slowdowns": slowdowns(self.log, self.report),
            "predictions": [asdict(one) for one in self.log.predictions],
            "incidents": [asdict(one) for one in self.log.incidents],
            "outages": [asdict(one) for one in self.log.outages],
        }

    def notes(self) -> Iterator[str]:
        """What the figures do not say, a line each."""
        if self.log.setup >= LEAST_SETUP:
            yield f"set-up took {duration(self.log.setup)}"
        yield from self.failures()

    def failures(self) -> Iterator[str]:
        """The first few, a line each."""
        failures = [one for one in self.log.incidents if one.failure]
        for one in failures[:_MOST_FAILURES]:
            yield f"{clock(one.t - self.log.start)} {one.who} {one.event}: {one.headline}"
        if len(failures) > _MOST_FAILURES:
            yield f"and {len(failures) - _MOST_FAILURES:,} failures more"

    def write(self) -> None:
        """Both files are made before either is replaced."""
        made = {
            TIMELINE_FILE: jsonl.encode(chrome_trace(self.log.spans, self.log.permits)),
            PAGE_FILE: page(self.log, self.report).encode(),
        }
        write_files(self.folder, made)


def run_report(run: Path) -> RunReport:
    """Reads a run folder, finished or not; a JigsawError where it is not one."""
    log = read_run(run)
    return RunReport(run, log, report_on(log))


def report_on(log: RunLog) -> Report:
    """The figures of a run, from what its folder or its events say."""
    return report(
        log.spans, log.workers, start=log.start, end=log.end, lives=log.lives, summaries=log.summaries
    )


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Makes the folder where there is none, and replaces these files in it, each at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            durable.replace(folder / name, content)
    except OSError as error:
        raise JigsawError(f"{folder}: cannot be written ({error.strerror or error})") from None


def write_report(run: Path) -> Path:
    """Makes or renews the page and the timeline of a run folder, and says where the page is."""
    made = run_report(run)
    made.write()
    return made.page
