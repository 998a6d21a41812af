"""Run files that are written to break what reads them: refused by file and line, in bounded time and memory."""

from __future__ import annotations

import os
import re
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from config_helpers import SUMS, config_of, refusal
from fuzzing.check import limited, message_problem

from jigsawrl.config import load_run_file, text
from jigsawrl.config.cluster import MOST_JOBS_BYTES, load_jobs_file
from jigsawrl.config.pipelines import checked_mix, load_mix
from jigsawrl.config.runfile import MOST_BYTES, validated
from jigsawrl.config.runfolder import check_run_folder
from jigsawrl.errors import JigsawError

MOST_MEMORY = 200 << 20
LETTERS = tuple(pairwise("abcdefghijklmnop"))
ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in LETTERS
)
MERGES = "a: &a {k: 1}\n" + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in LETTERS)
ENTRIES = "".join(f"k{number}: 1\n" for number in range(60_000))


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "sums.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ALIASES, r":\d+: not valid YAML: more than 104,857 values, aliases included"),
        (MERGES, r":\d+: not valid YAML: more than 104,857 values, aliases included"),
        (ENTRIES, r":\d+: not valid YAML: more than 104,857 values, aliases included"),
        (
            "task: &t {kind: arithmetic}\nmodel: &m {<<: *m}\n",
            ":2: not valid YAML: .m is used inside of what",
        ),
        ("[" * 100_000, ": nested too deeply"),
        ("{a: " * 50_000, ": nested too deeply"),
        ("- " * 50_000, ": nested too deeply"),
        ("name: " + "x" * MOST_BYTES, ": is larger than 1 MiB"),
        ("name: " + "x" * (MOST_BYTES - 6), ": name: 'xxx|name: 'xxx"),
    ],
)
def test_what_would_take_for_ever_is_refused_at_once(tmp_path: Path, content: str, said: str) -> None:
    path = written(tmp_path, content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with limited():
        message = refusal(load_run_file, path)
    assert re.match(f"({re.escape(str(path))})?({said})", message), message
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("!!timestamp x", "'x' is not a date; to make it text, put it in quotes"),
        ("!!timestamp {a: 1}", "expected a scalar node, but found mapping"),
        ("2026-13-45", "'2026-13-45' is not a date; to make it text, put it in quotes"),
        ("2026-11-19T25:61:61Z", "'2026-11-19T25:61:61Z' is not a date; to make it text, put it in quotes"),
        ("!!bool maybe", "'maybe' is not true or false; to make it text, put it in quotes"),
        ("!!int ''", "'' is not a whole number; to make it text, put it in quotes"),
        ("!!int x", "'x' is not a whole number; to make it text, put it in quotes"),
        ("!!float ''", "'' is not a number; to make it text, put it in quotes"),
        ("!!float x", "'x' is not a number; to make it text, put it in quotes"),
        ("0b_", "'0b_' is not a whole number; to make it text, put it in quotes"),
        ("0x" + "f" * 5000, f"'0x{'f' * 54}... is too long for a whole number"),
        ("0b" + "1" * 20_000, f"'0b{'1' * 54}... is too long for a whole number"),
        ("1" + ":59" * 5000, "'1:59"),
        ("9" * 5000, f"'{'9' * 56}... is too long for a whole number"),
        ("!!binary aGk=", "the tag '!!binary' has no meaning here; leave it out"),
        ("!!set {a, b}", "the tag '!!set' has no meaning here; leave it out"),
        ("!!omap [a: 1]", "the tag '!!omap' has no meaning here; leave it out"),
        ("!!pairs [a: 1]", "the tag '!!pairs' has no meaning here; leave it out"),
        (
            "!!python/object:os.system {}",
            "the tag '!!python/object:os.system' has no meaning here; leave it out",
        ),
        ("!mine x", "the tag '!mine' has no meaning here; leave it out"),
        ('"\\ud800"', "half of a surrogate pair, which is no character; remove it"),
        ("a\0b", "the character U+0000; remove it"),
        ("{? [a, b] : c}", "found unhashable key"),
    ],
)
def test_a_value_that_yaml_cannot_hold_is_refused_by_its_line(tmp_path: Path, value: str, said: str) -> None:
    path = written(tmp_path, f"task: {{kind: arithmetic}}\nsteps: {value}\n")
    with limited():
        message = refusal(load_run_file, path)
    assert message.startswith(f"{path}:2: not valid YAML: {said}"), message
    with limited():
        again = refusal(load_run_file, written(tmp_path, "task: {kind: arithmetic}\n"), [f"steps={value}"])
    assert f"not valid YAML: {said}" in again


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1e999", ".inf is not allowed"),
        (".nan", ".nan is not allowed"),
        ("1:30", "1000"),
        (f"{2**70}", f"{2**70} is not allowed; it must be at most 1000000000"),
        ("true", "true is not allowed"),
        ("'3'", "'3' is not allowed"),
        ("[3]", "[3] is not allowed"),
        ("{a: 3}", '{"a": 3} is not allowed'),
        ("=", "'=' is not allowed"),
        ("<<", "'<<' is not allowed"),
    ],
)
def test_a_number_of_steps_that_is_none_is_refused_by_its_key(tmp_path: Path, value: str, said: str) -> None:
    path = written(tmp_path, f"task: {{kind: arithmetic}}\nsteps: {value}\n")
    if value == "1:30":  # YAML 1.1's ninety
        assert load_run_file(path).steps == 90
    else:
        assert refusal(load_run_file, path).startswith(f"steps: {said}")


def test_anchors_aliases_and_merges_go_on_working(tmp_path: Path) -> None:
    deep = (
        "task: {kind: reasoning_gym, name: &n chain_sum, params: {outer: {inner: &i {<<: {a: 1, b: 2}, a: 3}},\n"
        "  again: {<<: *i, c: 4}, twice: [*n, *n]}}\n"
    )
    task: Any = load_run_file(written(tmp_path, deep)).task
    assert task.params["outer"] == {"inner": {"a": 3, "b": 2}}
    assert task.params["again"] == {"a": 3, "b": 2, "c": 4}
    assert task.params["twice"] == ["chain_sum", "chain_sum"]


def test_a_mapping_that_is_merged_before_it_is_read_has_no_key_twice(tmp_path: Path) -> None:
    """Its own keys may be those of what it merges, wherever both are in the file."""
    content = "x: {y: &a {<<: &d {k: 1}, k: 2}}\nb: {<<: *a, l: 3}\n"
    assert text.parse(content, "f") == {"x": {"y": {"k": 2}}, "b": {"k": 2, "l": 3}}


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe.yaml", tmp_path / "loop.yaml"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    with limited():
        said = [refusal(load_run_file, path) for path in (pipe, Path("/dev/zero"), Path("/dev/null"), loop)]
        too_long = refusal(load_run_file, tmp_path / ("x" * 300))
    assert said[:3] == [
        f"{pipe}: is a pipe, not a file; give an ordinary file",
        "/dev/zero: is a device, not a file; give an ordinary file",
        "/dev/null: is a device, not a file; give an ordinary file",
    ]
    assert said[3].startswith(f"{loop}: cannot be read")
    assert "cannot be read (File name too long)" in too_long


@pytest.mark.parametrize("content", [b"\xff\xfet\0a\0", b"\0", b"a: \xed\xa0\x80\n", "a: b".encode("utf-32")])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    assert re.match(
        rf"{re.escape(str(path))}(: is not UTF-8 text|:1: not valid YAML)", refusal(load_run_file, path)
    )


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert (
        load_run_file(written(tmp_path, b"\xef\xbb\xbftask: {kind: arithmetic}\n")).task.kind == "arithmetic"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 2**70}, "steps: "),
        ({"workers": 2**70}, "workers: "),
        (
            {"rollout": {"prompts_per_step": 10**6, "samples": 10**3}},
            "rollout.prompts_per_step: 1000000, with",
        ),
        (
            {"rollout": {"temperature": 1e-300}},
            "rollout.temperature: 1e-300 is not allowed; it must be at least",
        ),
        (
            {"rollout": {"temperature": 1e308}},
            "rollout.temperature: 1e+308 is not allowed; it must be at most",
        ),
        ({"rollout": {"max_num_seqs": 10**9}}, "rollout.max_num_seqs: 1000000000 is not allowed"),
        ({"rollout": {"stop_token_ids": [2**70]}}, "rollout.stop_token_ids[0]: "),
        ({"algorithm": {"kl_coef": 1e308}}, "algorithm.kl_coef: 1e+308 is not allowed; it must be at most"),
        ({"algorithm": {"minibatches": 2**40}}, "algorithm.minibatches: 1099511627776 is not allowed"),
        ({"trainer": {"eps": 1e-320}}, "trainer.eps: 1e-320 is not allowed; it must be at least"),
        (
            {"model": {"tiny": {"layers": 10**6}}},
            "model.tiny.layers: 1000000 is not allowed; it must be at most",
        ),
        ({"model": {"path": "a\nb"}}, r"model.path: 'a\nb' is no path here"),
        ({"model": {"path": "a\0b"}}, r"model.path: 'a\x00b' is no path here"),
        ({"model": {"path": ""}}, "model.path: '' is not allowed"),
        ({"name": "x" * 5000}, "name: 'xxxxx"),
        ({"x" * 5000: 1}, "xxxxx"),
        ({"[]": 1}, "[]: no such setting"),
        ({"\0\x1b[31m": 1}, r"\x00\x1b[31m: no such setting"),
        ({"task": {"kind": "arithmetic", "size": 10**9}}, "task.size: 1000000000 is not allowed"),
        ({"task": {"kind": "calculator", "processes": 10**6}}, "task.processes: 1000000 is not allowed"),
        ({"task": {"kind": "calculator", "env_timeout": 1e300}}, "task.env_timeout: 1e+300 is not allowed"),
        ({"task": {"kind": {"a": 1}}}, "task.kind: "),
    ],
)
def test_settings_beyond_anything_real_are_refused_by_their_keys(settings: dict[str, Any], said: str) -> None:
    with limited():
        message = refusal(lambda: config_of(**{"task": SUMS, **settings}))
    assert message.startswith(said), message
    assert message_problem(message) is None


def test_thousands_of_wrong_keys_are_counted_in_bounded_time(tmp_path: Path) -> None:
    with limited():
        said = refusal(
            load_run_file, written(tmp_path, "".join(f"k{number}: 1\n" for number in range(20_000)))
        )
    assert said.endswith(" (and 19998 more)")


def test_a_priority_fits_into_the_ledger_of_a_cluster() -> None:
    entry = {"run": "x.yaml", "priority": 2**70}
    assert "at most 1000000000" in refusal(checked_mix, {"pipelines": {"a": entry}})


def test_a_prompt_that_leaves_no_room_is_the_one_to_be_shortened() -> None:
    said = refusal(lambda: config_of(rollout={"max_prompt_tokens": 1024}))
    assert said.endswith("positions of the tiny model; lower rollout.max_prompt_tokens to at most 960")


def test_mixes_and_jobs_files_have_bounds_too(tmp_path: Path) -> None:
    path = written(tmp_path, ALIASES)
    with limited():
        for load in (load_mix, load_jobs_file):
            with pytest.raises(JigsawError, match="values, aliases included"):
                load(path)
    assert MOST_JOBS_BYTES > MOST_BYTES


@pytest.mark.parametrize(
    "code", ["-" * 100_000 + "1", "(" * 100_000, "x" + ".a" * 100_000, "\0", "x" * (17 << 20)]
)
def test_user_code_that_no_parser_survives_is_refused(tmp_path: Path, code: str) -> None:
    (tmp_path / "judge.py").write_text(code)
    task = "task: {kind: environment, path: judge.py:Game}\nmodel: {tiny: {warmup_steps: 0}}\n"
    with limited():
        said = refusal(load_run_file, written(tmp_path, task))
    assert said.startswith(f"task.path: {tmp_path}/judge.py")


def test_a_run_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(JigsawError, match="its name is not UTF-8 text"):
        check_run_folder(validated({"task": {"kind": "arithmetic"}}), out, resume=False)
    assert not out.exists()
