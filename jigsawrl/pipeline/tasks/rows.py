"""Reads the rows of a data file: JSONL, parquet, or the folder of a saved Hugging Face dataset.

Every value that comes out is JSON-serialisable, its texts have UTF-8, and every complaint names the file, the line or
row, and the column.
"""

import datetime
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import has_surrogates, shortened, shown
from jigsawrl.pipeline.tasks.base import JSON
from jigsawrl.regular import MAX_DEPTH, open_regular, read_json_object, too_deep

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
MAX_LINE_BYTES = 256 << 20
MAX_ROWS = 10_000_000
MAX_TABLE_BYTES = 2 << 30
"""Of a parquet file's values once they are unpacked: a small file can hold very many that are alike."""
ROWS_AT_ONCE = 1024
"""A compressed file of a few bytes may claim any number of rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one file with their numbers: lines from 1 in JSONL, rows from 0 elsewhere."""

    path: Path
    unit: str
    numbered: list[tuple[int, dict[str, JSON]]]

    def at(self, number: int) -> str:
        return f"{self.path}, {self.unit} {number}"


def read_rows(path: Path, format: str) -> Rows:
    """All rows of `path`; at least one. `format`: jsonl, parquet, hf (a folder), or auto by the path."""
    if not path.exists():
        raise JigsawError(f"{path}: no such file or folder")
    format = _guess_format(path) if format == "auto" else format
    if path.is_dir() != (format == "hf"):
        raise JigsawError(
            f"{path} is a {'folder' if path.is_dir() else 'file'}: not a dataset of format {format}"
        )
    try:
        rows = _read_jsonl(path) if format == "jsonl" else _read_arrow(path, format)
    except OSError as error:
        raise JigsawError(f"{path} cannot be read: {error}") from error
    if not rows.numbered:
        raise JigsawError(f"{path} has no rows")
    return rows


def to_json(value: Any) -> JSON:
    """`value` in plain JSON types; TypeError for bytes and other things that JSON cannot carry."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # numpy scalars and arrays
        value = value.tolist()
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case Decimal():
            return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
    raise TypeError(f"a value of type {type(value).__name__}")


def _guess_format(path: Path) -> str:
    if path.is_dir():
        return "hf"
    if path.suffix.lower() not in _SUFFIXES:
        raise JigsawError(
            f"{path}: the format does not show in the name; set task.format to jsonl or parquet\n"
            f"(known endings: {', '.join(_SUFFIXES)}, or the folder of a saved Hugging Face dataset)"
        )
    return _SUFFIXES[path.suffix.lower()]


def _read_jsonl(path: Path) -> Rows:
    rows = Rows(path, "line", [])
    with open_regular(path) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                break
            if len(line) > MAX_LINE_BYTES:
                raise JigsawError(f"{rows.at(number)}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                rows.numbered.append((number, _json_row(rows, number, line)))
    return rows


def _json_row(rows: Rows, number: int, line: bytes) -> dict[str, JSON]:
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise JigsawError(f"{rows.at(number)}: not a JSON object on one line: {error}") from error
    if not isinstance(row, dict):
        raise JigsawError(
            f"{rows.at(number)}: a {type(row).__name__} where one JSON object was expected\n"
            'JSONL has one row a line, such as {"prompt": "7+5=", "answer": "12"}'
        )
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and too_deep(row):
        raise JigsawError(
            f"{rows.at(number)}: the row nests more than {MAX_DEPTH} levels of lists and objects"
        )
    # Only an escape can make a lone surrogate of valid UTF-8.
    if b"\\u" in line and has_surrogates(json.dumps(row, ensure_ascii=False)):
        raise JigsawError(
            f"{rows.at(number)}: a text has half of a UTF-16 surrogate pair (\\ud800 to \\udfff), which has no "
            "UTF-8; write the whole character, or leave it out"
        )
    return row


def _refuse_duplicates(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"the name {shown(_first_duplicate([name for name, _ in pairs]))} occurs twice")
    return row


def _first_duplicate(names: list[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _read_arrow(path: Path, format: str) -> Rows:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise JigsawError(f"{path}: reading {format} needs pyarrow: pip install 'jigsawrl[data]'") from error

    rows = Rows(path, "row", [])
    files = list(_dataset_files(path)) if format == "hf" else [path]
    for file in files:
        open_regular(file).close()
        try:
            if format == "hf":
                with pa.memory_map(str(file)) as source:
                    table = pa.ipc.open_stream(source).read_all()
            else:
                parquet = pq.ParquetFile(file)
                _check_count(file, parquet.metadata.num_rows)
                table = pa.Table.from_batches(_unpacked(file, parquet), parquet.schema_arrow)
            _check_count(file, table.num_rows)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise JigsawError(f"{file} is torn, or not {format}: {shortened(said)}") from error
        if duplicate := _first_duplicate(table.column_names):
            raise JigsawError(f"{file}: the column {shown(duplicate)} occurs twice")
        columns = {name: _column(rows, name, table.column(name)) for name in table.column_names}
        for values in zip(*columns.values(), strict=True):
            rows.numbered.append((len(rows.numbered), dict(zip(columns, values, strict=True))))
    return rows


def _check_count(file: Path, count: int) -> None:
    if not 0 <= count <= MAX_ROWS:
        raise JigsawError(f"{file} says that it has {count} rows; at most {MAX_ROWS} can be read")


def _unpacked(file: Path, parquet: Any) -> list[Any]:
    """All rows, in pieces."""
    pieces, size = [], 0
    for piece in parquet.iter_batches(ROWS_AT_ONCE):
        size += piece.nbytes
        if size > MAX_TABLE_BYTES:
            raise JigsawError(
                f"{file}: its values take more than {MAX_TABLE_BYTES >> 20} MiB when they are unpacked\n"
                "Leave out columns and rows that are not needed."
            )
        pieces.append(piece)
    return pieces


def _column(rows: Rows, name: str, column: Any) -> list[JSON]:
    """The values of one column of a file whose first row comes after all of `rows`."""
    values = []
    for number, scalar in enumerate(column, start=len(rows.numbered)):
        try:
            value = to_json(scalar.as_py())
            if too_deep(value):
                raise ValueError(f"it nests more than {MAX_DEPTH} levels of lists and objects")
            values.append(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise JigsawError(
                f"{rows.at(number)}, column {shown(name)}: cannot be passed on as JSON: {shortened(str(error))}\n"
                "Drop the column or store it as text or numbers."
            ) from error
    return values


def _dataset_files(folder: Path) -> Iterator[Path]:
    """The arrow files of a folder that `Dataset.save_to_disk` wrote, in order."""
    if (folder / "dataset_dict.json").exists():
        splits = sorted(entry.parent.name for entry in folder.glob("*/state.json"))
        raise JigsawError(
            f"{folder} holds several splits: {', '.join(splits) or 'none found'}\n"
            f"Set task.path to one of them, such as {folder / (splits or ['train'])[0]}"
        )
    state = folder / "state.json"
    if not state.exists():
        raise JigsawError(f"{folder} is not a saved Hugging Face dataset: there is no state.json in it")
    try:
        names = [entry["filename"] for entry in read_json_object(state, "task.path")["_data_files"]]
        files = [folder / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise JigsawError(f"{state} does not name the dataset's files ({error!r})") from error
    for file in files:
        if not file.is_file():
            raise JigsawError(f"{folder}: the file {file.name} that state.json names is missing")
        yield file
