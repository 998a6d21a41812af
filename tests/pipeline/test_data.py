"""Data files: what comes in well, and what is said when it does not."""

import datetime
import json
import os
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.tasks import data, load_task
from jigsawrl.pipeline.tasks import rows as rows_module
from jigsawrl.pipeline.tasks.base import Prompt, RewardSpec, Task
from jigsawrl.pipeline.tasks.rows import read_rows, to_json

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 7+5?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"split": "train", "index": 0},
}


def load(path: Path, **columns: Any) -> Task:
    reward = SimpleNamespace(path="r.py:f", params={"a": 1}, timeout=5.0, on_error="zero", processes=2)
    base = {"kind": "data", "path": str(path), "format": "auto", "prompt": "prompt", "ground_truth": None}
    base |= {"data_source": None, "system_prompt": None, "reward": reward}
    return load_task(SimpleNamespace(**base | columns), seed=0)


def refusal(path: Path, **columns: Any) -> str:
    with pytest.raises(JigsawError) as caught:
        load(path, **columns)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    assert path.name in message
    return message


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(
        tmp_path / "sums.jsonl", '{"prompt": "7+5=", "answer": "12"}', '{"prompt": "1+1=", "answer": "2"}'
    )


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def save_dataset(folder: Path, *shards: list[dict[str, Any]]) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_format_columns": None,
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


# What comes in


def test_a_jsonl_file_gives_prompts_in_order_with_the_users_reward(sums: Path) -> None:
    task = load(sums)
    assert [task[0], task[1]] == [
        Prompt(0, "7+5=", None, "12", "sums", {"answer": "12"}),
        Prompt(1, "1+1=", None, "2", "sums", {"answer": "2"}),
    ]
    assert len(task) == 2
    assert task.reward == RewardSpec("r.py:f", {"a": 1}, 5.0, "zero", 2)
    assert (task.environment, task.demonstration(0)) == (None, None)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "é"}\r\n\r\n   \n{"prompt": "line\u2028separator"}'.encode())
    task = load(path)
    assert [task[index].text for index in range(len(task))] == ["é", "line\u2028separator"]


def test_a_parquet_file_with_verls_columns_needs_no_settings(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([VERL_ROW]), tmp_path / "train.parquet")
    others = {name: value for name, value in VERL_ROW.items() if name != "prompt"}
    messages = [{"role": "user", "content": "What is 7+5?"}]
    assert load(tmp_path / "train.parquet")[0] == Prompt(0, None, messages, "12", "openai/gsm8k", others)


def test_a_saved_dataset_is_read_shard_after_shard(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "saved", [{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "c"}])
    task = load(folder)
    assert [task[index].text for index in range(len(task))] == ["a", "b", "c"]


def test_a_dataset_saved_by_the_datasets_package_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([VERL_ROW | {"extra_info": {"index": index}} for index in range(5)])
    dataset.select([4, 2]).save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "splits")
    task = load(tmp_path / "saved")
    assert [task[index].extra["extra_info"]["index"] for index in range(len(task))] == [4, 2]
    assert len(load(tmp_path / "splits" / "test")) == 5
    assert "test, train" in refusal(tmp_path / "splits")


def test_columns_can_be_named_and_reached_into(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", '{"q": "7+5=", "meta": {"truth": [12], "from": "book"}, "a.b": 1}')
    prompt = load(path, format="jsonl", prompt="q", ground_truth="meta.truth", data_source="meta.from")[0]
    assert (prompt.text, prompt.ground_truth, prompt.data_source) == ("7+5=", [12], "book")
    assert load(path, format="jsonl", prompt="q", ground_truth="a.b")[0].ground_truth == 1


def test_a_ground_truth_is_found_under_its_name_before_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "7+5=", "answer": "7+5 is 12", "ground_truth": "12"}')
    assert load(path)[0].ground_truth == "12"


def test_a_ground_truth_is_not_required(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a.jsonl", '{"prompt": "Say hi."}'))[0].ground_truth is None


def test_a_system_prompt_comes_first_and_makes_text_a_message(tmp_path: Path, sums: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert load(sums, system_prompt="Be brief.")[0].messages == [system, {"role": "user", "content": "7+5="}]
    chat = write(tmp_path / "chat.jsonl", json.dumps(VERL_ROW))
    assert load(chat, system_prompt="Be brief.")[0].messages == [system, *VERL_ROW["prompt"]]


def test_empty_fields_of_messages_are_dropped(tmp_path: Path) -> None:
    """Arrow gives every message the fields of all of them."""
    rows = [{"prompt": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "3", "name": "dice"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet")[0].messages == rows[0]["prompt"]


def test_a_small_parquet_file_that_holds_gigabytes_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 200_000
    pq.write_table(pa.table({"prompt": ["x" * 1000] * rows, "answer": ["y"] * rows}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    monkeypatch.setattr("jigsawrl.pipeline.tasks.rows.MAX_TABLE_BYTES", 16 << 20)
    before = pa.total_allocated_bytes()
    with pytest.raises(JigsawError, match="its values take more than 16 MiB when they are unpacked"):
        load(tmp_path / "a.parquet")
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_typed_parquet_columns_become_json(tmp_path: Path) -> None:
    columns = {
        "prompt": ["a"],
        "answer": pa.array([Decimal("12.50")], pa.decimal128(6, 2)),
        "when": [datetime.datetime(2024, 2, 29, 12, 30)],
        "day": [datetime.date(2024, 2, 29)],
        "took": [datetime.timedelta(seconds=90)],
        "tags": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        "none": pa.nulls(1),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    prompt = load(tmp_path / "a.parquet")[0]
    assert prompt.ground_truth == 12.5
    assert {name: prompt.extra[name] for name in ("when", "day", "took", "tags", "none")} == {
        "when": "2024-02-29T12:30:00",
        "day": "2024-02-29",
        "took": 90.0,
        "tags": [["k", 1]],
        "none": None,
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(rows=st.lists(st.dictionaries(st.text(), VALUES, max_size=5), min_size=1, max_size=5))
def test_jsonl_rows_come_back_as_they_were_written(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    path = write(tmp_path / "any.jsonl", *[json.dumps(row) for row in rows])
    assert [row for _, row in read_rows(path, "auto").numbered] == rows


@settings(deadline=None)
@given(VALUES)
def test_json_values_pass_unchanged(value: Any) -> None:
    assert to_json(value) == value


def test_values_that_json_does_not_know_become_the_nearest_that_it_does() -> None:
    given = {1: (np.int64(3), np.float32(0.5), np.bool_(True), np.str_("s")), "array": np.eye(2)}
    given |= {"decimals": [Decimal("3.00"), Decimal("0.1")], "time": datetime.time(1, 2)}
    assert json.loads(json.dumps(to_json(given))) == {
        "1": [3, 0.5, True, "s"],
        "array": [[1.0, 0.0], [0.0, 1.0]],
        "decimals": [3, 0.1],
        "time": "01:02:00",
    }
    for value in (b"x", memoryview(b"x"), {1, 2}, object(), 1j):
        with pytest.raises(TypeError):
            to_json(value)


# What is refused


def test_a_torn_line_is_named(sums: Path) -> None:
    with sums.open("a") as file:
        file.write('{"prompt": "9+')
    assert "sums.jsonl, line 3: not a JSON object on one line: Unterminated string" in refusal(sums)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('["a"]', "line 1: a list where one JSON object was expected"),
        ("3", "line 1: a int where one JSON object was expected"),
        (
            '{"prompt": "a", "prompt": "b"}',
            "line 1: not a JSON object on one line: the name 'prompt' occurs twice",
        ),
        ("[" * 100_000, "line 1: not a JSON object on one line"),
        (
            '{"prompts": "a", "n": 1}',
            "there is no column 'prompt'; did you mean 'prompts'?\nColumns: prompts, n",
        ),
        ("{}", "there is no column 'prompt'\nColumns: none"),
        ('{"prompt": 7}', "line 1, column 'prompt': must be text or a list of chat messages, not a number"),
        ('{"prompt": null}', "not null"),
        ('{"prompt": {"role": "user"}}', "not an object"),
        ('{"prompt": ""}', "line 1, column 'prompt': the prompt is empty"),
        ('{"prompt": []}', "the prompt is empty"),
        ('{"prompt": ["hi"]}', "message 0 must be an object with role and content, not text"),
        ('{"prompt": [{"content": "hi"}]}', "message 0 has no 'role'"),
        ('{"prompt": [{"role": "user", "content": null}]}', "message 0 has no 'content'"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
            "'content' must be text, not a list",
        ),
        ('{"prompt": "a", "data_source": 3}', "line 1, column 'data_source': must be text, not a number"),
    ],
)
def test_a_bad_row_is_refused_with_its_place_and_reason(tmp_path: Path, line: str, complaint: str) -> None:
    assert complaint in refusal(write(tmp_path / "bad.jsonl", line))


def test_a_row_that_lacks_what_the_first_one_has_is_named(sums: Path) -> None:
    with sums.open("a") as file:
        file.write('\n{"prompt": "2+2="}\n')
    assert "line 4: there is no column 'answer'\nColumns: prompt" in refusal(sums)


def test_a_named_column_must_exist(sums: Path) -> None:
    assert "no column 'answers'; did you mean 'answer'?\nColumns: prompt, answer" in refusal(
        sums, ground_truth="answers"
    )
    assert "no column 'answer.value'" in refusal(sums, ground_truth="answer.value")
    assert "no column 'origin'" in refusal(sums, data_source="origin")


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": [{"role": "system", "content": "x"}]}')
    assert "leave task.system_prompt out" in refusal(path, system_prompt="y")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert "line 1" in refusal(path)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    assert "has no rows" in refusal(write(tmp_path / "empty.jsonl"))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    assert "has no rows" in refusal(tmp_path / "empty.parquet")
    assert "no such file" in refusal(tmp_path / "missing.jsonl")


def test_a_format_that_does_not_fit_is_refused(tmp_path: Path, sums: Path) -> None:
    assert "set task.format" in refusal(write(tmp_path / "a.csv", "prompt,answer"))
    assert "is torn, or not parquet" in refusal(sums, format="parquet")
    assert "is a file: not a dataset of format hf" in refusal(sums, format="hf")
    assert "is a folder: not a dataset of format jsonl" in refusal(tmp_path, format="jsonl")


def test_a_torn_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a" * 1000]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "is torn" in refusal(path)


def test_a_parquet_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "the column 'prompt' occurs twice" in refusal(tmp_path / "a.parquet")


def test_bytes_are_refused_with_row_and_column(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "image": None}, {"prompt": "b", "image": {"bytes": b"\x89PNG"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    message = refusal(tmp_path / "a.parquet")
    assert "row 1, column 'image'" in message
    assert "type bytes" in message


def test_a_folder_with_splits_asks_for_one_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    for split in ("train", "test"):
        save_dataset(folder / split, [{"prompt": "a"}])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    message = refusal(folder)
    assert "several splits: test, train" in message
    assert str(folder / "test") in message


def test_a_folder_that_is_no_saved_dataset_is_refused(tmp_path: Path) -> None:
    assert "no state.json" in refusal(tmp_path)
    folder = save_dataset(tmp_path / "saved", [{"prompt": "a"}])
    (folder / "data-00000-of-00001.arrow").write_bytes(b"not arrow")
    assert "is torn, or not hf" in refusal(folder)
    (folder / "data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow that state.json names is missing" in refusal(folder)
    (folder / "state.json").write_text('{"_data_files": 3}')
    assert "state.json does not name the dataset's files" in refusal(folder)


def test_without_pyarrow_the_pip_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'jigsawrl[data]'" in refusal(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "7+5=\\ud800"}', "a text has half of a UTF-16 surrogate pair"),
        ('{"prompt": "7+5=", "\\uDFFF": 1}', "a text has half of a UTF-16 surrogate pair"),
        ('{"prompt": ' + "[" * 500 + "]" * 500 + "}", "the row nests more than 100 levels"),
        ('{"prompt": ' + "[" * 100_000, "not a JSON object on one line: maximum recursion depth"),
        (
            '{"prompt": "7+5=", "answer": ' + "9" * 5000 + "}",
            "not a JSON object on one line: Exceeds the limit",
        ),
        ('{"' + "k" * 9000 + '": 1, "' + "k" * 9000 + '": 2}', "occurs twice"),
        ('{"' + "k\\n" * 9000 + '": 1}', "there is no column 'prompt'"),
    ],
)
def test_a_hostile_row_is_refused_in_few_words(tmp_path: Path, line: str, complaint: str) -> None:
    message = refusal(write(tmp_path / "p.jsonl", line))
    assert complaint in message
    assert "p.jsonl, line 1" in message
    assert len(message) < 600 + len(str(tmp_path))


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    assert load(write(tmp_path / "p.jsonl", '{"prompt": "\\ud83d\\ude00"}'))[0].text == "\U0001f600"


def test_a_line_without_end_is_refused_at_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 1 << 20)
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    assert "p.jsonl, line 1: the line is longer than 1 MiB" in refusal(tmp_path / "p.jsonl")


def test_a_prompt_that_no_context_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_PROMPT_CHARACTERS", 1000)
    messages = [{"role": "user", "content": "7" * 600}] * 2
    for value in ("7" * 1001, messages):
        assert "line 1, column 'prompt': the prompt has 1" in refusal(
            write(tmp_path / "p.jsonl", json.dumps({"prompt": value}))
        )


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
@pytest.mark.parametrize("device", [None, "/dev/zero"])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(
    tmp_path: Path, name: str, device: str | None
) -> None:
    path = tmp_path / name
    path.symlink_to(device) if device else os.mkfifo(path)
    assert "not a regular file" in refusal(path)


def test_a_dataset_with_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "d", [{"prompt": "7+5="}])
    shard = next(folder.glob("*.arrow"))
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(JigsawError, match=r"the file .*arrow that state\.json names is missing"):
        load(folder)


def test_a_file_that_claims_more_rows_than_memory_holds_is_refused(tmp_path: Path) -> None:
    """Runs of one value take no space: a few kilobytes a million rows."""
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"n": pa.array(np.zeros(11_000_000, np.int8))}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    assert "says that it has 11000000 rows" in refusal(path)


def test_offsets_beyond_the_end_of_a_column_are_refused_before_they_are_followed(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "d", [{"prompt": "7+5="}, {"prompt": "1+1="}])
    shard = next(folder.glob("*.arrow"))
    content = shard.read_bytes()
    offsets = np.array([0, 4, 8], np.int32).tobytes()
    assert content.count(offsets) == 1
    shard.write_bytes(content.replace(offsets, np.array([0, 4, 1 << 30], np.int32).tobytes()))
    with pytest.raises(JigsawError, match="is torn, or not hf"):
        load(folder)
