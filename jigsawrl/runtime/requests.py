"""What users asked of a run while it was under way, on the disk: pipelines submitted, cancelled and paused.

Every change is on the disk when the method returns, so what was answered with "accepted" survives a kill and is
taken up by --resume. `submitted.json` holds the pipelines, `requests.json` the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.regular import read_regular
from jigsawrl.underway import under_way

SUBMITTED, REQUESTS = "submitted.json", "requests.json"
MOST_BYTES = 64 << 20
Entry = dict[str, Any]
"""A pipeline's entry in a run file."""


class Requests:
    def __init__(self, out: Path) -> None:
        """Those that the run folder has; a JigsawError where they cannot be read."""
        self.out = out
        self.submitted: dict[str, Entry] = _read(out / SUBMITTED, dict[str, Entry])
        others: dict[str, list[str]] = _read(out / REQUESTS, dict[str, list[str]])
        self.cancelled = frozenset(others.get("cancelled", ()))
        self.paused = frozenset(others.get("paused", ()))

    def submit(self, name: str, entry: Entry) -> None:
        entries = {**self.submitted, name: entry}
        durable.replace(self.out / SUBMITTED, json.dumps(entries, indent=1).encode())
        self.submitted = entries

    def cancel(self, name: str) -> None:
        self._save(self.cancelled | {name}, self.paused - {name})

    def pause(self, name: str) -> None:
        self._save(self.cancelled, self.paused | {name})

    def withdraw(self, name: str) -> None:
        """Neither cancelled nor paused any more."""
        self._save(self.cancelled - {name}, self.paused - {name})

    def _save(self, cancelled: frozenset[str], paused: frozenset[str]) -> None:
        if (cancelled, paused) != (self.cancelled, self.paused):
            content = {"cancelled": sorted(cancelled), "paused": sorted(paused)}
            durable.replace(self.out / REQUESTS, json.dumps(content, indent=1).encode())
            self.cancelled, self.paused = cancelled, paused


def take_back(run: Path, name: str) -> None:
    """`jigsaw resume` where no process runs what is in the folder: the pipeline goes on with the next --resume."""
    with under_way(run):
        requests = Requests(run)
        if name not in requests.cancelled | requests.paused:
            raise JigsawError(f"{run}: has ended; 'jigsaw run FILE --resume' goes on with it")
        requests.withdraw(name)


def _read(path: Path, kind: Any) -> Any:
    """What a file of ours holds; nothing where there is none."""
    try:
        return TypeAdapter(kind).validate_python(json.loads(read_regular(path, MOST_BYTES)))
    except FileNotFoundError:
        return kind()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = ": ".join((*map(str, first["loc"]), first["msg"]))
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    raise JigsawError(f"{path}: cannot be read ({why}); repair it, or remove it to forget what it holds")
