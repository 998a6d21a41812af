"""Folders of measured runs: read as they are, or refused with one message that names the place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jigsawrl.errors import JigsawError
from jigsawrl.graph.traces import read_traces

STEP = {
    "timing_s/gen": 20.0,
    "timing_s/old_log_prob": 5.0,
    "timing_s/ref": 6.0,
    "timing_s/update_actor": 12.0,
    "timing_s/update_weights": 1.0,
    "timing_s/step": 44.5,
    "prompt_length/mean": 80.0,
    "response_length/mean": 25.0,
    "num_turns/mean": 2.0,
    "perf/total_num_tokens": 840.0,
}
FORWARDS = (
    "mode,batch_size,prefill_tokens,avg_seq_len,forward_time_ms\nEXTEND,2,81,71.5,19.1\nDECODE,4,0,90,4.1\n"
)


def write(folder: Path, steps: list[dict[str, Any]] | None = None, **entry: Any) -> Path:
    """A workload of two steps with eight sequences each."""
    if steps is None:
        steps = [{"step": number, **STEP} for number in (1, 2)]
    index = {
        "gsm8k_qwen3-4b": {"steps": steps, "sequences_per_step": 8, "lengths": "a.lengths.csv.gz", **entry}
    }
    (folder / "workloads.json").write_text(json.dumps(index))
    rows = "".join(f"{step},{10 + 5 * i}\n" for step in (1, 2) for i in range(8))
    with gzip.open(folder / "a.lengths.csv.gz", "wt") as file:
        file.write("step,response_tokens\n" + rows)
    return folder


def message(folder: Path) -> str:
    with pytest.raises(JigsawError) as error:
        read_traces(folder)
    text = str(error.value)
    assert 1 <= len(text.splitlines()) <= 3
    return text


def test_a_workload_is_read_with_its_lengths_and_model(tmp_path):
    (tmp_path / "f.forwards.csv").write_text(FORWARDS)
    (trace,) = read_traces(write(tmp_path, forwards="f.forwards.csv"))
    assert trace.model.name == "qwen3-4b"
    assert [step.step for step in trace.steps] == [1, 2]
    assert trace.steps[0].lengths.tolist() == [10, 15, 20, 25, 30, 35, 40, 45]
    assert trace.steps[0].turns == 1
    assert trace.forwards is not None
    assert trace.forwards["prefill"].tolist() == [True, False]
    assert trace.forwards["seconds"][1] == pytest.approx(4.1e-3)


def test_missing_keys_forwards_and_steps_are_no_hindrance(tmp_path):
    steps = [{"step": 2, "timing_s/gen": 3.0}, {"step": 7, "timing_s/gen": 3.0}]
    (trace,) = read_traces(write(tmp_path, steps))
    assert [step.step for step in trace.steps] == [2]  # of 7 nothing tells the lengths
    assert trace.steps[0].ref is None
    assert trace.forwards is None


def test_tables_may_be_uncompressed_and_any_model_may_be_stated_by_its_numbers(tmp_path):
    numbers = {
        "name": "mine",
        "parameters": 3e9,
        "layers": 20,
        "hidden": 2048,
        "kv_heads": 4,
        "head_dim": 128,
    }
    write(tmp_path, model=numbers)
    packed = tmp_path / "a.lengths.csv.gz"
    (tmp_path / "a.lengths.csv").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    (trace,) = read_traces(tmp_path)
    assert trace.model.name == "mine"
    assert trace.sequences == 8


def test_a_folder_without_an_index_says_what_is_missing(tmp_path):
    assert "workloads.json" in message(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "  \n", "{", '{"a": [', "[]", "{}", "3", '{"a": 3}', '{"qwen3-4b": {"steps": []}}']
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "workloads.json").write_text(text)
    assert "workloads.json" in message(tmp_path)


def test_a_torn_index_names_its_line(tmp_path):
    write(tmp_path)
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1)[:-40])
    assert "line 3" in message(tmp_path)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "fast", True, 1e30])
def test_nonsensical_seconds_name_their_step_and_key(tmp_path, value):
    text = message(write(tmp_path, [{"step": 1, **STEP}, {"step": 2, **STEP, "timing_s/gen": value}]))
    assert "steps[1]" in text
    assert "timing_s/gen" in text


def test_more_turns_than_can_be_predicted_name_their_step(tmp_path):
    assert "num_turns/mean is 5000.0, which cannot be" in message(
        write(tmp_path, [{"step": 1, **STEP, "num_turns/mean": 5000.0}])
    )


def test_a_truncated_gzip_is_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / "a.lengths.csv.gz"
    path.write_bytes(path.read_bytes()[:-12])
    assert "a.lengths.csv.gz" in message(tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "is empty"),
        ("step,response_tokens\n", "no lengths"),
        ("step,tokens\n1,2\n", "line 1"),
        ("step,response_tokens\n1,20\n1,-3\n", "line 3"),
        ("step,response_tokens\n1,20\n1,nan\n", "line 3"),
        ("step,response_tokens\n1,20\n1\n", "line 3"),
        ("step,response_tokens\n1,20\n1,many\n", "line 3"),
        ("step,response_tokens\n1,20\n1,30\n", "2 lengths and not 8"),
        ("\x00\x01\x02", "a.lengths.csv.gz"),
    ],
)
def test_a_damaged_table_names_its_line(tmp_path, rows, said):
    write(tmp_path)
    with gzip.open(tmp_path / "a.lengths.csv.gz", "wt") as file:
        file.write(rows)
    text = message(tmp_path)
    assert "a.lengths.csv.gz" in text
    assert said in text


@pytest.mark.parametrize("row", ["DECODE,4,0,90,-4", "DECODE,4,0,90", "SLEEP,4,0,90,4", "DECODE,x,0,90,4"])
def test_a_damaged_pass_names_its_line(tmp_path, row):
    (tmp_path / "f.csv").write_text(FORWARDS + row + "\n")
    assert "f.csv, line 4" in message(write(tmp_path, forwards="f.csv"))


def test_a_table_outside_of_the_folder_is_refused(tmp_path):
    assert "not the name of a file" in message(write(tmp_path, forwards="../f.csv"))


def test_a_missing_table_is_named(tmp_path):
    assert "b.csv" in message(write(tmp_path, lengths="b.csv"))


def test_an_unknown_model_says_how_to_state_it(tmp_path):
    write(tmp_path)
    path = tmp_path / "workloads.json"
    path.write_text(path.read_text().replace("gsm8k_qwen3-4b", "mystery"))
    text = message(tmp_path)
    assert "mystery" in text
    assert '"model"' in text
