"""The timeline: what ran where and when, read from the event log, and written so that Perfetto opens it.

A trace has one process for the pipelines, with the stages of each, its permits and its waits, and one for
every worker, with a track for each pipeline that runs there. Spans of one track that overlap go to further tracks of
the same name: Perfetto shows only slices that nest.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, NamedTuple

from jigsawrl.errors import JigsawError
from jigsawrl.telemetry.events import SUBSTAGES, Substage

WAITS: frozenset[Substage] = frozenset({"tool", "reward"})
"""These take time and no worker."""

OVERHEADS: frozenset[Substage] = frozenset({"sync", "swap"})
"""These occupy a worker and are no useful work."""

STAGES: dict[Substage, str] = {
    "prefill": "rollout",
    "decode": "rollout",
    "tail": "rollout",
    "tool": "rollout",
    "reward": "reward",
    "logprob": "log-probs",
    "grad": "update",
    "optim": "update",
    "sync": "weight sync",
}
"""The stage that a sub-stage is a piece of; a swap is a piece of none."""

_KNOWN = frozenset(SUBSTAGES)
_OWN = frozenset({"t", "event", "substage", "pipeline", "worker", "workers", "step", "t0", "t1", "share"})
_PIPELINES_PID = 1
_COLOURS = {
    "prefill": "thread_state_runnable",
    "decode": "thread_state_running",
    "tail": "good",
    "tool": "thread_state_sleeping",
    "reward": "rail_idle",
    "logprob": "rail_animation",
    "grad": "rail_load",
    "optim": "rail_response",
    "sync": "thread_state_iowait",
    "swap": "terrible",
    "rollout": "thread_state_running",
    "log-probs": "rail_animation",
    "update": "rail_load",
    "weight sync": "thread_state_iowait",
    "wait": "thread_state_sleeping",
    "permit": "good",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A sub-stage that ran from t0 to t1 with this share of each of its workers. `fields` is what else was logged."""

    substage: Substage
    pipeline: str
    workers: tuple[int, ...]
    step: int
    t0: float
    t1: float
    share: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.substage not in _KNOWN:
            raise ValueError(f"{self.substage!r} is not a sub-stage")
        if not -math.inf < self.t0 <= self.t1 < math.inf:
            raise ValueError(f"a span cannot last from {self.t0} to {self.t1}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"a share is between 0 and 1, not {self.share}")


@dataclass(frozen=True, slots=True)
class Permit:
    """A phase that asked, was let run at t0 and gave its workers back at t1."""

    pipeline: str
    phase: str
    step: int
    asked: float
    t0: float
    t1: float


def read_spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The sub-stages among the records of an event log, in its order."""
    return [_span(event) for event in events if event.get("event") == "substage"]


def _span(event: Mapping[str, Any]) -> Span:
    try:
        return Span(
            event["substage"],
            event["pipeline"],
            _workers(event),
            int(event["step"]),
            float(event["t0"]),
            float(event["t1"]),
            float(event.get("share", 1.0)),
            {name: value for name, value in event.items() if name not in _OWN},
        )
    except KeyError as error:
        raise JigsawError(f"the event log has a sub-stage without {error}: {dict(event)}") from error
    except (TypeError, ValueError) as error:
        raise JigsawError(f"the event log has a sub-stage that is none ({error}): {dict(event)}") from error


def _workers(event: Mapping[str, Any]) -> tuple[int, ...]:
    if "workers" in event:
        return tuple(sorted({int(worker) for worker in event["workers"]}))
    return (int(event["worker"]),) if "worker" in event else ()


class _Slice(NamedTuple):
    """Something on a track, in whole microseconds: what touches in the log touches in the trace."""

    begin: int
    end: int
    name: str
    kind: str
    args: dict[str, Any]


_Tracks = dict[tuple[int, str], list[_Slice]]


def chrome_trace(spans: Iterable[Span], permits: Iterable[Permit] = ()) -> dict[str, Any]:
    """The spans in Chrome's trace-event format, times counted from the first of them."""
    ordered = sorted(spans, key=attrgetter("t0", "t1"))
    start = ordered[0].t0 if ordered else 0.0
    tracks: _Tracks = {}
    _add_pipelines(tracks, ordered, start)
    _add_workers(tracks, ordered, start)
    _add_permits(tracks, permits, start)
    return {"traceEvents": list(_events(tracks)), "displayTimeUnit": "ms"}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _add_workers(tracks: _Tracks, spans: Sequence[Span], start: float) -> None:
    for span in spans:
        if span.substage in WAITS:
            continue
        begin, end = _microseconds(span.t0 - start), _microseconds(span.t1 - start)
        args = {"step": span.step, "share": span.share, **span.fields}
        piece = _Slice(begin, end, span.substage, span.substage, args)
        for worker in span.workers:
            tracks.setdefault((_PIPELINES_PID + 1 + worker, span.pipeline), []).append(piece)


def _add_pipelines(tracks: _Tracks, spans: Sequence[Span], start: float) -> None:
    """A stage lasts from the first of its step's spans to the last; waits are the times with at least one."""
    stages: dict[tuple[str, int, str], list[Span]] = {}
    waits: dict[tuple[str, int, str], list[Span]] = {}
    for span in spans:
        if span.substage in STAGES:
            stages.setdefault((span.pipeline, span.step, STAGES[span.substage]), []).append(span)
        if span.substage in WAITS:
            waits.setdefault((span.pipeline, span.step, span.substage), []).append(span)
    for (pipeline, step, stage), pieces in stages.items():
        stretch = _stretch(pieces, start, f"{stage} {step}", stage)
        tracks.setdefault((_PIPELINES_PID, pipeline), []).append(stretch)
    for (pipeline, _, kind), pieces in waits.items():
        track = tracks.setdefault((_PIPELINES_PID, f"{pipeline}: waits"), [])
        track += [_stretch(run, start, kind, kind) for run in _runs(pieces)]


def _add_permits(tracks: _Tracks, permits: Iterable[Permit], start: float) -> None:
    """Each one from when it was given, and the wait for it."""
    for permit in permits:
        track = tracks.setdefault((_PIPELINES_PID, f"{permit.pipeline}: permits"), [])
        asked, t0, t1 = (_microseconds(max(t - start, 0.0)) for t in (permit.asked, permit.t0, permit.t1))
        what, args = f"{permit.phase} {permit.step}", {"step": permit.step}
        if asked < t0:
            track.append(_Slice(asked, t0, f"waits for {what}", "wait", args))
        track.append(_Slice(t0, t1, f"permit: {what}", "permit", args))


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans, sorted by their beginnings, in groups without a gap."""
    run: list[Span] = []
    end = -math.inf
    for span in spans:
        if run and span.t0 > end:
            yield run
            run = []
        run.append(span)
        end = max(end, span.t1)
    if run:
        yield run


def _stretch(spans: Sequence[Span], start: float, name: str, kind: str) -> _Slice:
    begin, end = min(span.t0 for span in spans), max(span.t1 for span in spans)
    args: dict[str, Any] = {"step": spans[0].step, "spans": len(spans)}
    tokens = sum(generated(span) for span in spans)
    if tokens:
        args["tokens"] = tokens
    return _Slice(_microseconds(begin - start), _microseconds(end - start), name, kind, args)


def generated(span: Span) -> int:
    """The tokens that a span sampled; a prefill's were there before."""
    return int(span.fields.get("tokens") or 0) if span.substage in ("decode", "tail") else 0


def _events(tracks: _Tracks) -> Iterator[dict[str, Any]]:
    tid = 0
    for pid in sorted({pid for pid, _ in tracks}):
        worker = pid - _PIPELINES_PID - 1
        name = "pipelines" if pid == _PIPELINES_PID else f"worker {worker}"
        yield _metadata("process_name", pid, name=name)
        yield _metadata("process_sort_index", pid, sort_index=pid)
        for track in sorted(name for owner, name in tracks if owner == pid):
            lanes: dict[int, int] = {}
            for piece, lane in _in_lanes(tracks[pid, track]):
                if lane not in lanes:
                    tid += 1
                    lanes[lane] = tid
                    yield _metadata("thread_name", pid, tid, name=track)
                    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
                yield _complete(piece, pid, lanes[lane])


def _in_lanes(pieces: list[_Slice]) -> Iterator[tuple[_Slice, int]]:
    """Each slice with the first lane that is free when it begins: as few lanes as the most that overlap."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for piece in sorted(pieces, key=attrgetter("begin", "end")):
        while busy and busy[0][0] <= piece.begin:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (piece.end, lane))
        yield piece, lane


def _metadata(kind: str, pid: int, tid: int = 0, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _complete(piece: _Slice, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": piece.name,
        "cat": piece.kind,
        "pid": pid,
        "tid": tid,
        "ts": piece.begin,
        "dur": piece.end - piece.begin,
        "cname": _COLOURS[piece.kind],
        "args": piece.args,
    }
