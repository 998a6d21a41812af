"""What one pipeline tells while it runs: timed stages, sub-stage events, the figures of each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jigsawrl.telemetry.events import EventSink, PassSpan, Substage, now
from jigsawrl.telemetry.figures import STAGES
from jigsawrl.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.telemetry.progress import Shown

MAX_WARNINGS = 5


class Journal:
    """Collects `timing_s/...` of the stages of a step and passes everything on at its end."""

    def __init__(
        self, config: RunConfig, out: Path, events: EventSink, done: int, resumed: bool, progress: Shown
    ) -> None:
        self.pipeline = config.name
        self.workers = config.workers
        self.progress = progress
        telemetry = config.telemetry
        self.metrics = Metrics(
            out,
            tensorboard=telemetry.tensorboard,
            wandb={"project": telemetry.wandb.project, "name": config.name} if telemetry.wandb else None,
            resume_step=done if resumed else None,
        )
        self.events = events
        self.events.emit("resume" if resumed else "start", pipeline=config.name, step=done)
        self.step = done
        self.started = now()
        self.timings: dict[str, float] = {}
        self.warnings = 0
        self.last: dict[str, float] = {}
        progress.start(config.name, config.steps, done)

    def begin(self, step: int) -> None:
        self.step = step

    @contextmanager
    def stage(self, name: str, substage: Substage | None = None) -> Iterator[None]:
        """Times a stage under the name users know; with `substage`, it is one sub-stage of the event log too."""
        t0 = now()
        self.progress.doing(self.pipeline, self.step, STAGES.get(f"timing_s/{name}", name))
        if substage is None:
            yield
        else:
            with self.substage(substage):
                yield
        key = f"timing_s/{name}"
        self.timings[key] = self.timings.get(key, 0.0) + now() - t0

    @contextmanager
    def substage(self, substage: Substage) -> Iterator[None]:
        fields: dict[str, Any] = {"workers": list(range(self.workers))} if self.workers > 1 else {}
        with self.events.span(substage, pipeline=self.pipeline, step=self.step, **fields):
            yield

    def samples(self, done: int, of: int) -> None:
        """So many of a rollout's samples have ended."""
        self.progress.doing(self.pipeline, self.step, STAGES["timing_s/gen"], done, of)

    def passes(self, spans: list[list[PassSpan]]) -> None:
        """The passes of each worker's engine."""
        for worker, passed in enumerate(spans):
            for span in passed:
                self.events.record(
                    span.substage,
                    pipeline=self.pipeline,
                    step=self.step,
                    worker=worker,
                    t0=span.t0,
                    t1=span.t1,
                    tokens=span.tokens,
                    sequences=span.sequences,
                    passes=span.passes,
                )

    def waited(self, substage: Literal["tool", "reward"], t0: float, t1: float) -> None:
        """No engine had anything to do but wait. Rewards count as a stage of their own."""
        for worker in range(self.workers):
            self.events.record(
                substage, pipeline=self.pipeline, step=self.step, worker=worker, t0=t0, t1=t1, tokens=0
            )
        if substage == "reward":
            self.timings["timing_s/reward"] = self.timings.get("timing_s/reward", 0.0) + t1 - t0
            self.timings["timing_s/gen"] = self.timings.get("timing_s/gen", 0.0) - (t1 - t0)

    def end(self, values: dict[str, float]) -> None:
        self.timings["timing_s/step"] = now() - self.started
        self.last = {**values, **self.timings}
        self.metrics.log(self.step, self.last)
        self.events.emit("step", pipeline=self.pipeline, step=self.step)
        self.progress.update(self.pipeline, self.step, self.last)
        self.started, self.timings = now(), {}  # what comes between two steps counts to the later one

    def say_once(self, text: str, event: str = "warning") -> None:
        """Tells the user what is told once in a run, however many warnings there are."""
        self.events.emit(event, pipeline=self.pipeline, step=self.step, text=text)
        self.progress.message(text)

    def warn(self, text: str) -> None:
        """Tells the user, but not for ever."""
        self.events.emit("warning", pipeline=self.pipeline, step=self.step, text=text)
        self.warnings += 1
        if self.warnings <= MAX_WARNINGS:
            more = " (further warnings only in events.jsonl)" if self.warnings == MAX_WARNINGS else ""
            self.progress.message(text + more)

    def close(self, event: str) -> None:
        self.events.emit(event, pipeline=self.pipeline, step=self.step)
        self.events.close()
        self.metrics.close()
