"""The command and the Python API, up to where training starts: what is wrong shows first, and costs nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Case, Outcome, files_in, outcomes_of, python, without_torch

import jigsawrl
from jigsawrl.api import target_of
from jigsawrl.config.runfile import validated
from jigsawrl.config.runfolder import check_run_folder
from jigsawrl.errors import JigsawError

SUMS = "task: {kind: arithmetic}\n"
RUN_OF_THEIR_OWN = validated({"name": "sums", "task": {"kind": "arithmetic"}}).to_yaml()
SCRIPT = """
import jigsawrl

def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)

jigsawrl.train(task="rows.jsonl", reward=reward, steps=3)
"""


DATA = (
    ("score.py", "def score(completions): ...\n"),
    (
        "data.yaml",
        "task: {kind: data, path: rows.jsonl, reward: {path: 'score.py:score'}}\n"
        "model: {tiny: {warmup_steps: 0}}\n",
    ),
)
CASES = {
    "version": Case("--version", 0, "", f"jigsaw {jigsawrl.__version__}\n"),
    "no file": Case("run", 2, "jigsaw: Missing argument 'FILE'\ntry 'jigsaw run --help'\n"),
    "no such file": Case("run no.yaml", 2, "jigsaw: no.yaml: there is no such run file\n"),
    "no such option": Case(
        "run sums.yaml --dryrun",
        2,
        "jigsaw: No such option: --dryrun (Possible options: --dry-run)\ntry 'jigsaw run --help'\n",
    ),
    "no such command": Case(
        "runn", 2, "jigsaw: No such command 'runn'. Did you mean 'run'?\ntry 'jigsaw --help'\n"
    ),
    "no such model to fetch": Case("fetch gpt5", 2, "jigsaw: gpt5: no such model; there is smollm2\n"),
    "unknown key": Case(
        "run sums.yaml rollout.sampels=3 --json",
        2,
        "jigsaw: rollout.sampels: no such setting; did you mean 'samples'?\n",
    ),
    "several problems": Case(
        "run sums.yaml steps=ten seed=-1 workers=0 threads=0",
        2,
        "jigsaw: seed: -1 is not allowed; it must be a whole number, at least 0 and at most 4294967295 (default 0)\n"
        "steps: 'ten' is not allowed; it must be a whole number, at least 1 (default 100)\n"
        "workers: 0 is not allowed; it must be a whole number, at least 1 (default 1) (and 1 more)\n",
    ),
    "no date": Case(
        "run sums.yaml rollout.date=tomorrow",
        2,
        "jigsaw: rollout.date: 'tomorrow' is not allowed; it must be a date such as 2026-11-19, or null\n",
    ),
    "no such date": Case(
        "run sums.yaml rollout.date='2026-02-30'",
        2,
        "jigsaw: rollout.date: '2026-02-30' is not allowed; it must be a date such as 2026-11-19, or null\n",
    ),
    "no model": Case(
        "run sums.yaml model.path=nowhere --out there",
        2,
        "jigsaw: model.path: {folder}/nowhere does not exist; give a Hugging Face folder on this machine, or tiny "
        "('jigsaw fetch smollm2' makes a folder)\n",
    ),
    "folder in use": Case(
        "run sums.yaml",
        2,
        "jigsaw: runs/sums: is not empty, and holds no run; choose another folder with --out\n",
        files=(("runs/sums/notes.txt", ""),),
    ),
    "folder of another run": Case(
        "run sums.yaml seed=1 --resume",
        2,
        "jigsaw: runs/sums: holds a run with other settings: seed was 0, is 1\n"
        "resume it with the settings it had, or choose another folder with --out\n",
        files=(("runs/sums/config.yaml", RUN_OF_THEIR_OWN),),
    ),
    "wrong data": Case(
        "run data.yaml",
        2,
        "jigsaw: {folder}/rows.jsonl, line 1: there is no column 'prompt'\nColumns: question\n",
        files=(("rows.jsonl", '{"question": "1+1="}\n'), *DATA),
    ),
    "too little data": Case(
        "run data.yaml",
        2,
        "jigsaw: rollout.prompts_per_step: 16 is more than the 1 prompts of the task; set it to at most 1\n",
        files=(("rows.jsonl", '{"prompt": "1+1="}\n'), *DATA),
    ),
    "dry run": Case("run sums.yaml --dry-run", 0, "", RUN_OF_THEIR_OWN),
    "dry run as json": Case("run sums.yaml --dry-run --json steps=3", 0, "", None),
    "help": Case("--help", 0, "", None),
    "help for run": Case("run --help", 0, "", None),
    "help for fetch": Case("fetch -h", 0, "", None),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return without_torch(tmp_path_factory)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Outcome]:
    return outcomes_of(CASES, (("sums.yaml", SUMS),), tmp_path_factory, environment)


@pytest.mark.parametrize("name", CASES)
def test_the_command_says_what_is_wrong_without_torch_and_writes_nothing(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    case, outcome = CASES[name], outcomes[name]
    assert outcome.stderr == case.stderr.format(folder=outcome.folder)
    if case.stdout is not None:
        assert outcome.stdout == case.stdout
    assert outcome.code == case.code
    assert outcome.written == set()


def test_a_real_process_ends_with_code_2_and_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    done = python(environment, "-m", "jigsawrl", "run", "sums.yaml", "stpes=3", cwd=tmp_path)
    message = "jigsaw: stpes: no such setting; did you mean 'steps'?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert files_in(tmp_path) == {"sums.yaml"}


def test_torch_cannot_be_imported_in_these_cases(environment: dict[str, str]) -> None:
    assert "imported before everything was checked" in python(environment, "-c", "import torch").stderr


def test_a_dry_run_as_json_is_one_line_with_every_setting(outcomes: dict[str, Outcome]) -> None:
    (line,) = outcomes["dry run as json"].stdout.splitlines()
    assert validated(json.loads(line)) == validated(
        {"name": "sums", "task": {"kind": "arithmetic"}, "steps": 3}
    )


def test_training_while_being_imported_says_how_to_guard_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = python(environment | {"JIGSAWRL_SANDBOX": "1"}, "train.py", cwd=tmp_path)
    assert 'put the call under: if __name__ == "__main__":' in done.stderr
    assert files_in(tmp_path) == {"train.py"}


def hears_interrupts() -> None:
    """A shell's background jobs do not, nor what they start: whoever runs these tests may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_is_one_line_and_130(tmp_path: Path, environment: dict[str, str]) -> None:
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "yaml.py").write_text("open('gate').read()\n")
    command = [sys.executable, "-m", "jigsawrl", "run", "run.yaml"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    with process:
        with (tmp_path / "gate").open("w"):  # opens as soon as the command has begun, and imports yaml
            process.send_signal(signal.SIGINT)
        # Closed: a signal that came just before the command began to wait is noticed when it need not wait any more.
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "jigsaw: interrupted; a run goes on with --resume\n")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jigsawrl", "run", "sums.yaml", "--dry-run"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, "")


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("help", ["run", "fetch", "simulate", "compare", "fit", "--version"]),
        ("help for run", ["FILE", "a.b=c ...", "--out DIR", "--resume", "--dry-run", "--json"]),
        ("help for fetch", ["MODEL", "--out DIR"]),
    ],
)
def test_help_fits_a_small_terminal_and_names_everything(
    name: str, entries: list[str], outcomes: dict[str, Outcome]
) -> None:
    page = outcomes[name].stdout
    assert max(map(len, page.splitlines())) <= 80
    assert page.startswith("Usage: jigsaw ")
    assert "\nExamples\n" in page
    assert all(f"\n  {entry} " in page for entry in [*entries, "-h, --help"])


def test_with_json_stdout_is_kept_for_the_result(environment: dict[str, str]) -> None:
    code = (
        "import os; from jigsawrl.cli_output import stdout_on_stderr\n"
        "print('before')\n"
        "with stdout_on_stderr(True): print('from us'); os.system('echo from a child')\n"
        "print('result')"
    )
    done = python(environment, "-c", code)
    assert done.stdout == "before\nresult\n"
    assert sorted(done.stderr.splitlines()) == ["from a child", "from us"]


def test_importing_the_package_loads_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys, jigsawrl; print([m for m in ('torch', 'pydantic', 'yaml', 'numpy') if m in sys.modules])"
    )
    assert python(environment, "-c", code).stdout == "[]\n"
    assert jigsawrl.load_run_file
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = jigsawrl.trian


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


class Scorer:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0]

    def score(self, completions: list[str]) -> list[float]:
        return [0.0]


def test_a_function_is_known_by_its_file_and_name() -> None:
    assert target_of(reward) == f"{Path(__file__).resolve()}:reward"


def inner() -> Callable[..., float]:
    def score(completions: list[str]) -> float:
        return 0.0

    return score


@pytest.mark.parametrize(
    "function", [lambda completions: 0.0, inner(), Scorer(), Scorer().score, len, json.dumps.__call__]
)
def test_a_function_that_other_processes_cannot_import_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(JigsawError, match=r"cannot be imported by other processes;\nput it into a .py file"):
        target_of(function)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": {"kind": "arithmetic"}, "rolout": {}}, "rolout: no such setting; did you mean 'rollout'?"),
        (
            {"task": {"kind": "arithmetic"}, "steps": "3"},
            "steps: '3' is not allowed; it must be a whole number",
        ),
        (
            {"task": {"kind": "arithmetic"}, "reward": reward},
            "task.reward: no such setting; task has kind",
        ),
        ({"task": "rows.jsonl"}, "task.reward: missing"),
        ({"task": "rows.jsonl", "reward": "no.py:f", "model": "m"}, "model.path: {folder}/m does not exist"),
        (
            {"task": Path("rows.jsonl"), "reward": reward, "model": {"tiny": {"warmup_steps": 0}}},
            "task.path: there is no file or folder {folder}/rows.jsonl",
        ),
        (
            {"task": {"kind": "arithmetic"}, "out": "here"},
            "here: is not empty, and holds no run; choose another folder with out=...",
        ),
        ({"task": {}}, "task.kind: missing"),
    ],
)
def test_training_refuses_what_a_run_file_would_be_refused_for(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").touch()
    with pytest.raises(JigsawError) as caught:
        jigsawrl.train(**arguments)
    assert str(caught.value).startswith(message.format(folder=tmp_path))
    assert files_in(tmp_path) == {"here", "here/notes.txt"}


def test_train_names_its_arguments_where_the_command_names_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = validated({"name": "arithmetic", "task": {"kind": "arithmetic"}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    (tmp_path / "file").touch()
    said = {}
    for out, more in {"run": {}, "file": {}, "other": {"out": "run", "resume": True, "seed": 1}}.items():
        with pytest.raises(JigsawError) as caught:
            jigsawrl.train(**{"task": {"kind": "arithmetic"}, "out": out, **more})
        said[out] = str(caught.value)
    assert said == {
        "run": "run: holds a run already; continue it with resume=True, or choose another with out=...",
        "file": "file: is a file; choose another folder with out=...",
        "other": "run: holds a run with other settings: seed was 0, is 1\n"
        "resume it with the settings it had, or choose another folder with out=...",
    }
    with pytest.raises(JigsawError, match="continue it with --resume, or choose another with --out"):
        check_run_folder(config, tmp_path / "run", resume=False)


@pytest.mark.parametrize("folder", ["config/runfolder.py", "pipeline", "trainer", "engine", "model"])
def test_what_the_command_and_train_share_names_no_flag_itself(folder: str) -> None:
    """It asks `surface.option`."""
    where = Path(jigsawrl.__file__).parent / folder
    for path in [where] if where.is_file() else where.rglob("*.py"):
        assert not re.search(r"--(out|resume)\b", path.read_text()), path


@pytest.mark.parametrize(("argument", "value"), [("task", None), ("model", None), ("reward", [len])])
def test_train_says_which_argument_it_cannot_use(argument: str, value: object) -> None:
    arguments: dict[str, Any] = {"task": "rows.jsonl", argument: value}
    with pytest.raises(JigsawError, match=rf"^{argument}: .* is not allowed; it must be a path[^\n]+$"):
        jigsawrl.train(**arguments)


def test_the_package_lists_what_it_loads_on_demand() -> None:
    assert {*jigsawrl.__all__, "__doc__"} <= set(dir(jigsawrl))
    assert "train" in dir(jigsawrl)


def test_settings_given_to_train_are_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, model = {"kind": "data", "path": "rows.jsonl"}, {"path": "m"}
    with pytest.raises(JigsawError, match="does not exist"):
        jigsawrl.train(task=task, model=model, reward=reward)
    assert (task, model) == ({"kind": "data", "path": "rows.jsonl"}, {"path": "m"})
