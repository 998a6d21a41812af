"""The tasks by kind, except data files (test_data.py) and what the environments do (test_bundled_environments.py)."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.environments.calculator import Calculator
from jigsawrl.pipeline.environments.pool import Environments, StepResult
from jigsawrl.pipeline.rewards import Rewards
from jigsawrl.pipeline.tasks import load_task
from jigsawrl.pipeline.tasks.arithmetic import draw_problems, exact_match
from jigsawrl.pipeline.tasks.base import EnvironmentSpec, Prompt, RewardSpec
from jigsawrl.pipeline.tasks.reasoning_gym import pack, unpack
from jigsawrl.pipeline.tasks.reasoning_gym_reward import score

SANDBOXED = {"env_timeout": 9.0, "on_error": "stop", "processes": 3}


def arithmetic(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"kind": "arithmetic", "max_number": 20, "operations": ["+"], "size": 50} | settings
    )


def calculator(**settings: Any) -> SimpleNamespace:
    base = {"kind": "calculator", "latency": 0.0, "latency_jitter": 0.0, "max_number": 99, "size": 20}
    base |= {"operations": ("+", "-", "*"), "max_turns": 4}
    return SimpleNamespace(**base | SANDBOXED | settings)


def puzzles(name: str, **settings: Any) -> SimpleNamespace:
    base = {"kind": "reasoning_gym", "name": name, "params": {}, "size": 5, "system_prompt": None}
    return SimpleNamespace(**base | SANDBOXED | settings)


def game(name: str, **settings: Any) -> SimpleNamespace:
    base = {"kind": "textarena", "name": name, "params": {}, "size": 4, "max_turns": 7, "system_prompt": None}
    return SimpleNamespace(**base | SANDBOXED | settings)


def refusal(config: SimpleNamespace) -> str:
    with pytest.raises(JigsawError) as caught:
        load_task(config, seed=0)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    return message


def test_loading_a_task_imports_nothing_heavy() -> None:
    code = (
        "import sys; from types import SimpleNamespace as N; from jigsawrl.pipeline.tasks import load_task\n"
        "load_task(N(kind='arithmetic', max_number=9, operations=['+'], size=9), 0)\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'pyarrow', 'reasoning_gym', 'textarena', 'numpy'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_an_unknown_kind_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="chess"):
        load_task(SimpleNamespace(kind="chess"), seed=0)


def test_bundled_rewards_and_environments_run_in_processes_of_their_own() -> None:
    sums, hard_sums, numbers = arithmetic(), calculator(), game("GuessTheNumber-v0")
    rewards = Rewards(cast(RewardSpec, load_task(sums, seed=0).reward))
    calculators = Environments(cast(EnvironmentSpec, load_task(hard_sums, seed=0).environment))
    games = Environments(cast(EnvironmentSpec, load_task(numbers, seed=0).environment))
    try:
        scores = rewards.submit(
            load_task(sums, seed=0)[0], ["x", load_task(sums, seed=0).demonstration(0) or ""]
        )
        task = load_task(hard_sums, seed=0)
        assert calculators.reset("a", 1, task[0].extra).result() == f"{task[0].extra['expression']}="
        step = calculators.step("a", f"={task[0].ground_truth}").result()
        assert isinstance(step, StepResult)
        assert (step.reward, step.done) == (1.0, True)
        assert "Guess The Number" in str(games.reset("b", 1, load_task(numbers, seed=0)[0].extra).result())
        assert [score.value for score in scores.result()] == [0.0, 1.0]
    finally:
        for opened in (rewards, calculators, games):
            opened.close()


# Arithmetic


@settings(deadline=None)
@given(
    max_number=st.integers(0, 12),
    operations=st.lists(st.sampled_from("+-*"), min_size=1, unique=True),
    size=st.integers(1, 300),
    seed=st.integers(0, 2**32),
)
def test_sums_are_right_in_range_and_not_repeated_needlessly(
    max_number: int, operations: list[str], size: int, seed: int
) -> None:
    problems = draw_problems(max_number, operations, size, seed)
    assert len(problems) == size
    there_are = (max_number + 1) ** 2 * len(operations)
    assert len({problem.expression for problem in problems}) == min(size, there_are)
    for problem in problems:
        assert problem.operation in operations
        assert 0 <= problem.left <= max_number
        assert 0 <= problem.right <= max_number
        assert problem.answer == eval(problem.expression)
    assert problems == draw_problems(max_number, list(reversed(operations)), size, seed)


def test_the_first_prompts_of_a_seed_never_change() -> None:
    """Pinned: other machines, Python versions and releases must see the same prompts."""
    task = load_task(arithmetic(operations=["+", "-", "*"]), seed=3)
    assert [task[index].text for index in range(5)] == ["7-15=", "19-5=", "17-14=", "4+5=", "12-0="]
    assert task[1].text != load_task(arithmetic(operations=["+", "-", "*"]), seed=4)[1].text


def test_an_arithmetic_prompt_its_demonstration_and_its_reward_agree() -> None:
    task = load_task(arithmetic(), seed=0)
    prompt = task[7]
    assert prompt == Prompt(7, prompt.text, None, prompt.ground_truth, "arithmetic", {})
    left, right = (prompt.text or "").rstrip("=").split("+")
    assert task.demonstration(7) == prompt.ground_truth == str(int(left) + int(right))
    assert task.environment is None
    assert task.reward is not None
    assert task.reward.target == "jigsawrl.pipeline.tasks.arithmetic:exact_match"
    assert len(task) == 50


def test_only_the_exact_number_is_rewarded() -> None:
    answers = ["12", " 12\n", "12.", "012", "1", "", "12 12"]
    assert [exact_match("arithmetic", answer, "12") for answer in answers] == [1, 1, 0, 0, 0, 0, 0]


def test_arithmetic_without_operations_or_with_giant_numbers_is_refused() -> None:
    assert "operations among + - *" in refusal(arithmetic(operations=[]))
    assert "1000000000" in refusal(arithmetic(max_number=10**40))


# Calculator


def test_a_calculator_demonstration_is_an_episode_that_is_rewarded() -> None:
    """Played turn by turn as in a rollout, its turns bring about its observations and a reward of 1."""
    task = load_task(calculator(), seed=5)
    for index in range(len(task)):
        prompt = task[index]
        episode = Calculator(latency=0.0)
        assert episode.reset(seed=1, **prompt.extra) == f"{prompt.extra['expression']}="
        call, rest = (task.demonstration(index) or "").split("]")
        observation, reward, done, _ = asyncio.run(episode.step(call + "]"))
        assert (reward, done) == (0.0, False)
        assert rest.startswith(observation)
        answer = rest.removeprefix(observation)
        assert answer == f"={prompt.ground_truth}"
        assert asyncio.run(episode.step(answer))[1:3] == (1.0, True)


def test_the_calculator_runs_as_an_environment_with_the_settings_of_the_run_file() -> None:
    task = load_task(calculator(latency=0.5, latency_jitter=0.25), seed=0)
    assert task.reward is None
    assert task.environment == EnvironmentSpec(
        target="jigsawrl.pipeline.environments.calculator:Calculator",
        params={"latency": 0.5, "latency_jitter": 0.25},
        timeout=9.0,
        on_error="stop",
        processes=3,
        max_turns=4,
        system_prompt=None,
    )
    assert (task[19].index, task[19].text, task[19].messages) == (19, None, None)


# The user's own environment


def test_an_environment_of_the_users_own_is_named_by_its_path() -> None:
    config = SimpleNamespace(
        kind="environment", path="maze.py:Maze", params={"width": 3}, size=2, max_turns=5
    )
    config.__dict__.update(SANDBOXED, system_prompt="Find the way out.")
    task = load_task(config, seed=0)
    spec = EnvironmentSpec("maze.py:Maze", {"width": 3}, 9.0, "stop", 3, 5, "Find the way out.")
    assert (task.reward, task.environment, len(task)) == (None, spec, 2)
    assert task[1] == Prompt(1, None, None, None, "maze.py:Maze", {})
    assert task.demonstration(0) is None
    with pytest.raises(IndexError):
        task[2]


# reasoning-gym


def test_puzzles_are_chat_messages_and_the_same_in_every_process() -> None:
    config = puzzles("chain_sum", params={"min_terms": 2, "max_terms": 2}, system_prompt="Be brief.")
    task = load_task(config, seed=11)
    prompt = task[3]
    assert prompt.text is None
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": unpack(prompt.extra["entry"])["question"]},
    ]
    assert (prompt.index, prompt.data_source) == (3, "reasoning_gym/chain_sum")
    assert prompt == load_task(config, seed=11)[3]
    assert prompt.messages != load_task(config, seed=12)[3].messages
    assert task.reward is not None
    assert (task.reward.timeout, task.reward.on_error, task.reward.processes) == (9.0, "stop", 3)
    assert len(task) == 5
    with pytest.raises(IndexError):
        task[5]


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "countdown", "zebra_puzzles", "arc_agi"])
def test_the_reward_is_the_packages_own_score_after_a_trip_through_json(name: str) -> None:
    """arc_agi compares with tuples, which plain JSON would lose."""
    task = load_task(puzzles(name), seed=2)
    assert task.reward is not None
    for index in range(2):
        prompt = task[index]
        row = json.loads(json.dumps({"ground_truth": prompt.ground_truth, "extra_info": prompt.extra}))
        right = task.demonstration(index)
        for text in (right, f" {right}\n", f"So <answer>no</answer>, or rather <answer>{right}</answer>."):
            assert score(prompt.data_source, text or "", **row, **task.reward.params) == 1.0
        assert score(prompt.data_source, "no idea", **row, **task.reward.params) < 1.0


def test_puzzles_without_one_right_answer_have_no_demonstration() -> None:
    assert load_task(puzzles("graph_color"), seed=0).demonstration(0) is None


def test_an_unknown_puzzle_or_setting_is_refused_with_what_there_is() -> None:
    assert "chain_sum" in refusal(puzzles("chainsum"))
    assert "max_terms" in refusal(puzzles("chain_sum", params={"terms": 3}))
    assert "size is task.size" in refusal(puzzles("chain_sum", params={"seed": 3}))
    assert "min_terms" in refusal(puzzles("chain_sum", params={"min_terms": 9, "max_terms": 2}))
    assert "min_terms" in refusal(puzzles("chain_sum", params={"min_terms": "two"}))


def test_puzzles_that_change_with_the_hash_seed_ask_for_a_fixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED=0" in refusal(puzzles("ransom_note"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(load_task(puzzles("ransom_note"), seed=0)) == 5


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        ),
        max_leaves=20,
    )
)
def test_a_packed_entry_survives_json_exactly(value: Any) -> None:
    assert repr(unpack(json.loads(json.dumps(pack(value))))) == repr(value)


# textarena


def test_a_game_by_name_runs_as_an_environment() -> None:
    task = load_task(game("GuessTheNumber-v0", params={"max_number": 8}), seed=0)
    assert task.environment is not None
    assert task.environment.target == "jigsawrl.pipeline.environments.textarena:TextArena"
    assert task.environment.params == {"name": "GuessTheNumber-v0", "params": {"max_number": 8}}
    assert (task.reward, task.environment.max_turns, len(task)) == (None, 7, 4)
    assert task[2] == Prompt(2, None, None, None, "textarena/GuessTheNumber-v0", {})


def test_games_that_cannot_be_played_alone_or_at_all_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("TicTacToe-v0", "QuantumTicTacToe-v0", "LiarsDice-v0", "Surround-v0", "PublicGoodsGame-v0"):
        assert f"{name} is not a game for one player" in refusal(game(name))
    assert "near it: GuessTheNumber-v0" in refusal(game("GuesTheNumber-v0"))
    assert "unexpected keyword argument 'width'" in refusal(game("GuessTheNumber-v0", params={"width": 3}))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "package"), [("reasoning_gym", "reasoning_gym"), ("textarena", "textarena")]
)
def test_a_missing_extra_is_named_with_its_pip_command(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    config = puzzles("chain_sum") if kind == "reasoning_gym" else game("GuessTheNumber-v0")
    assert "pip install 'jigsawrl[envs]'" in refusal(config)


def test_hash_seeds_do_not_change_prompts() -> None:
    """Two fresh processes with different hash seeds see the same prompts."""
    code = (
        "from types import SimpleNamespace as N; from jigsawrl.pipeline.tasks import load_task\n"
        "from jigsawrl.pipeline.environments.textarena import TextArena\n"
        "task = load_task(N(kind='arithmetic', max_number=9, operations={'+', '*', '-'}, size=9), 0)\n"
        "print([prompt.text for prompt in task], TextArena('Sudoku-v0', {}).reset(seed=9))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
