"""Run files as text: YAML and overrides in, the resolved file out."""

import copy
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from config_helpers import SUMS, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.config import RunConfig, load_run_file, text
from jigsawrl.config.runfile import anchor_paths, validated
from jigsawrl.config.runfolder import differences
from jigsawrl.config.schema import all_settings
from jigsawrl.errors import JigsawError


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.yaml"
    path.write_text("task: {kind: arithmetic}\n")
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"# nothing yet\n", "is empty; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"- task\n", "is a list; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"task\n", "is 'task'; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"seed: 1\nname: \xff\xfe\n", "is not UTF-8 text (byte 14); save it as UTF-8"),
        (b"[" * 1000, "nested too deeply to be a run file"),
        (b"a: !!python/object:os.system {}\n", None),
    ],
)
def test_what_is_no_run_file_is_refused(run_file: Path, content: bytes, message: str | None) -> None:
    run_file.write_bytes(content)
    shown = refusal(load_run_file, run_file)
    assert shown.startswith(str(run_file))
    assert message is None or shown == f"{run_file}: {message}"


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("task:\n\tkind: arithmetic\n", 2, "a tab where only spaces may be; indent with spaces"),
        ("seed: 1\nsteps: 2\nseed: 3\n", 3, "'seed' is already given on line 1; remove one"),
        ("task:\n  kind: data\n  kind: data\n", 3, "'kind' is already given on line 2; remove one"),
        (
            "a: b: c\n",
            1,
            "a second ':' on the line, or a wrong indentation; put text with ': ' in quotes",
        ),
        ("seed: 1\n---\nseed: 2\n", 2, "a second document begins here ('---'); a run file holds one"),
        ("seed: [1, 2\nsteps: 3\n", 2, None),
        ("seed: 'a\n", 2, None),
    ],
)
def test_a_yaml_error_names_the_line(run_file: Path, content: str, line: int, message: str | None) -> None:
    run_file.write_text(content)
    shown = refusal(load_run_file, run_file)
    assert shown.startswith(f"{run_file}:{line}: not valid YAML: ")
    assert message is None or shown.endswith(f": {message}")


def test_a_run_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(load_run_file, tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: there is no such run file"
    assert (
        refusal(load_run_file, tmp_path)
        == f"{tmp_path}: is a folder; give a run file, such as {tmp_path}/run.yaml"
    )


def test_numbers_in_scientific_notation_are_numbers(run_file: Path) -> None:
    run_file.write_text("task: {kind: arithmetic}\ntrainer: {lr: 1e-6, eps: 1E-7, weight_decay: 1.e-2}\n")
    trainer = load_run_file(run_file).trainer
    assert (trainer.lr, trainer.eps, trainer.weight_decay) == (1e-6, 1e-7, 1e-2)
    assert "'1e-6' is not allowed" in refusal(load_run_file, run_file, ["trainer.lr='1e-6'"])


def test_anchors_and_merges_are_no_duplicates(run_file: Path) -> None:
    run_file.write_text(
        "task: {kind: arithmetic}\nrollout: &r {samples: 4}\nmodel: {lora: &l {rank: 4}}\n"
        "trainer: {<<: &t {lr: 0.1, eps: 0.1}, lr: 0.2}\n"
    )
    trainer = load_run_file(run_file).trainer
    assert (trainer.lr, trainer.eps) == (0.2, 0.1)


@pytest.mark.parametrize(
    ("content", "line", "alias"),
    [
        ("seed: &s [*s]\ntask: {kind: arithmetic}\n", 1, "*s"),
        ("task:\n  {kind: reasoning_gym, name: x, params: &p {a: *p}}\n", 2, "*p"),
        ("task: &t {kind: arithmetic, size: *t}\n", 1, "*t"),
    ],
)
def test_what_contains_itself_is_refused(run_file: Path, content: str, line: int, alias: str) -> None:
    run_file.write_text(content)
    said = refusal(load_run_file, run_file)
    assert said == f"{run_file}:{line}: not valid YAML: {alias} is used inside of what it stands for"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
numeric_text = st.from_regex(r"[-+]?[0-9]*\.?[0-9]*[eE]?[-+]?[0-9]+", fullmatch=True)


@settings(deadline=None, max_examples=40)
@given(
    params=st.dictionaries(st.text() | numeric_text, json_values | numeric_text, max_size=4),
    stop=st.lists(st.text(min_size=1) | numeric_text, max_size=3),
    lr=st.floats(min_value=0, max_value=1),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    lora=st.none() | st.just({"rank": 3, "targets": ["q_proj", "down_proj"]}),
)
def test_a_resolved_file_gives_the_same_config(
    params: dict[str, Any], stop: list[str], lr: float, name: str, lora: Any
) -> None:
    config = validated(
        {
            "name": name,
            "task": {"kind": "reasoning_gym", "name": "chain_sum", "params": params},
            "rollout": {"stop": stop},
            "trainer": {"lr": lr},
            "model": {"lora": lora},
        }
    )
    again = validated(text.parse(config.to_yaml(), "resolved"))
    assert again == config
    assert again.to_yaml() == config.to_yaml()
    assert differences(config, again) == []


anything = json_values | st.sampled_from(
    [float("nan"), float("inf"), 10**400, date(2024, 1, 2), [{}], {1: 2}, b""]
)


@settings(deadline=None, max_examples=80)
@given(
    task=st.sampled_from(
        [SUMS, {"kind": "data", "path": "x", "reward": {"path": "m:f"}}, {"kind": "calculator"}]
    ),
    changes=st.dictionaries(
        st.sampled_from(sorted(set(all_settings(RunConfig)))), anything, min_size=1, max_size=4
    ),
)
def test_whatever_is_in_a_run_file_gives_a_config_or_at_most_three_lines(
    task: dict[str, Any], changes: dict[str, Any]
) -> None:
    data: dict[str, Any] = {"task": dict(task)}
    for name in sorted(changes):
        *parents, last = name.split(".")
        section = data
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[last] = copy.deepcopy(changes[name])
    anchor_paths(data, Path("/folder"))
    try:
        config = validated(data)
    except JigsawError:
        assert refusal(validated, data)
    else:
        assert validated(text.parse(config.to_yaml(), "resolved")) == config


def test_overrides_are_yaml_and_make_the_sections_they_need(run_file: Path) -> None:
    overrides = [
        "steps=7",
        "model.lora.rank=4",
        "rollout.stop=['a=b', \"\\n\"]",
        "algorithm.overlong={buffer: 4}",
        "trainer.max_grad_norm=",
        "trainer.lr=1e-5",
        "name=x",
    ]
    config = load_run_file(run_file, overrides)
    assert (config.name, config.steps, config.trainer.lr, config.trainer.max_grad_norm) == (
        "x",
        7,
        1e-5,
        None,
    )
    assert config.rollout.stop == ("a=b", "\n")
    assert config.model.lora
    assert config.model.lora.rank == 4
    assert config.algorithm.overlong
    assert config.algorithm.overlong.buffer == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is no override; write section.key=value, such as rollout.samples=8"),
        ("=3", "'=3' is no override; write section.key=value, such as rollout.samples=8"),
        ("a..b=3", "'a..b=3' is no override; write section.key=value, such as rollout.samples=8"),
        ("rollout.sampels=3", "rollout.sampels: no such setting; did you mean 'samples'?"),
        ("rolout.samples=3", "rolout: no such setting; did you mean 'rollout'?"),
        ("name.x=3", "name.x=3: name is 'sums', not a section"),
        ("rollout.stop=[a", None),
    ],
)
def test_a_wrong_override_is_refused(run_file: Path, override: str, message: str | None) -> None:
    shown = refusal(load_run_file, run_file, [override])
    assert shown == message if message else shown.startswith(f"{override}:1: not valid YAML: ")
