"""What users asked of a run while it was under way, on the disk: pipelines submitted, cancelled and paused.

Every change is on the disk when the method returns, so what was answered with "accepted" survives a kill and is
taken up by --resume. `submitted.json` holds the pipelines, `requests.json` the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
        self.submitted: dict[str, Entry] = {}
        found, others = _object(out / SUBMITTED), _object(out / REQUESTS)
        for name, entry in found.items():
            if not isinstance(entry, dict):
                raise _unreadable(out / SUBMITTED, f"{name} has no settings")
            self.submitted[name] = entry
        self.cancelled = _names(others, "cancelled", out / REQUESTS)
        self.paused = _names(others, "paused", out / REQUESTS)

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

    def _save(self, cancelled: Iterable[str], paused: Iterable[str]) -> None:
        new = frozenset(cancelled), frozenset(paused)
        if new == (self.cancelled, self.paused):
            return
        content = {"cancelled": sorted(new[0]), "paused": sorted(new[1])}
        durable.replace(self.out / REQUESTS, json.dumps(content, indent=1).encode())
        self.cancelled, self.paused = new


def take_back(run: Path, name: str) -> None:
    """`jigsaw resume` where no process runs what is in the folder: the pipeline goes on with the next --resume."""
    with under_way(run):
        requests = Requests(run)
        if name not in requests.cancelled | requests.paused:
            raise JigsawError(f"{run}: has ended; 'jigsaw run FILE --resume' goes on with it")
        requests.withdraw(name)


def _object(path: Path) -> dict[str, Any]:
    """What a file of ours holds; nothing where there is none."""
    try:
        content = json.loads(read_regular(path, MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(content, dict):
        raise _unreadable(path, "it holds no object")
    return content


def _names(content: dict[str, Any], key: str, path: Path) -> frozenset[str]:
    names = content.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unreadable(path, f"{key} is no list of names")
    return frozenset(names)


def _unreadable(path: Path, why: str) -> JigsawError:
    return JigsawError(f"{path}: cannot be read ({why}); repair it, or remove it to forget what it holds")
