"""Episodes of text environments in processes of their own, with user code that ends them."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.environments.pool import Environments, StepResult, read_reset, read_step
from jigsawrl.pipeline.sandbox import Failure
from jigsawrl.pipeline.tasks.base import EnvironmentSpec

USER_CODE = Path(__file__).with_name("user_code.py")
CALCULATOR = "jigsawrl.pipeline.environments.calculator:Calculator"
Make = Callable[..., Environments]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Environments] = []

    def environments(
        name: str, params: dict[str, Any] | None = None, timeout: float = 10, **more: Any
    ) -> Environments:
        target = name if ":" in name else f"{USER_CODE}:{name}"
        rest = {"on_error": "zero", "processes": 1, "max_turns": 9, "system_prompt": None} | more
        made.append(Environments(EnvironmentSpec(target, params or {}, timeout, **rest)))
        return made[-1]

    yield environments
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def counter() -> Iterator[Environments]:
    environments = Environments(EnvironmentSpec(f"{USER_CODE}:Counter", {}, 10.0, "zero", 1, 9, None))
    yield environments
    environments.close()


def result(future: Future[Any]) -> Any:
    return future.result(30)


def play(environments: Environments, episode: str, seed: int, *actions: str) -> list[Any]:
    """The first observation, and the observation, or failure, of every step."""
    seen = [result(environments.reset(episode, seed, {}))]
    for action in actions:
        step = result(environments.step(episode, action))
        seen.append(step.observation if isinstance(step, StepResult) else step)
    return seen


def test_an_episode_is_played_from_reset_to_done(make: Make) -> None:
    environments = make("Counter", {"start": 1})
    assert result(environments.reset("a", 5, {"level": 2})) == "seed 5 {'level': 2}"
    first = result(environments.step("a", "3"))
    last = result(environments.step("a", "6"))
    assert (first.reward, first.done, last.reward, last.done) == (4.0, False, 10.0, True)
    assert first.observation.startswith("4 ")
    assert set(first.info) == {"pid"}


def test_the_bundled_calculator_runs_here(make: Make) -> None:
    environments = make(CALCULATOR, {"latency": 0.001})
    assert result(environments.reset("a", 0, {"expression": "6*7"})) == "6*7="
    assert result(environments.step("a", "[6*7]")) == StepResult("\n42\n", 0.0, False, {})
    assert result(environments.step("a", "=42")) == StepResult("", 1.0, True, {})


def test_gymnasiums_five_values_are_understood(make: Make) -> None:
    environments = make("Gymnasium")
    assert result(environments.reset("a", 5, {})) == "seed 5 {}"
    assert [result(environments.step("a", "1")).done for _ in range(2)] == [False, True]


def test_episodes_do_not_see_each_other(make: Make) -> None:
    environments = make("Counter", processes=2)
    names = [f"{n}" for n in range(20)]
    for future in [environments.reset(name, int(name), {}) for name in names]:
        result(future)
    for _ in range(3):
        for future in [environments.step(name, name) for name in names]:
            result(future)
    totals = [result(environments.step(name, "0")).reward for name in names]
    assert totals == [3.0 * n for n in range(20)]


@pytest.mark.parametrize("name", ["Counter", "Async"])
def test_the_waits_of_sixty_four_episodes_overlap(make: Make, name: str) -> None:
    environments = make(name)
    wait = "do siesta" if name == "Counter" else "siesta"
    for future in [environments.reset(f"{n}", n, {}) for n in range(64)]:
        result(future)
    started = time.monotonic()
    steps = [result(future) for future in [environments.step(f"{n}", wait) for n in range(64)]]
    assert time.monotonic() - started < 6  # one after the other: 13 s
    assert all(isinstance(step, StepResult) for step in steps)


@pytest.mark.parametrize(("name", "death"), [("Counter", "do exit"), ("Async", "segfault")])
def test_episodes_live_on_when_another_one_ends_their_process(make: Make, name: str, death: str) -> None:
    """Some are idle at that moment and some under way; their later observations are as if nothing had been."""
    environments = make(name)
    nap = "do nap" if name == "Counter" else "nap"
    undisturbed = play(environments, "quiet", 3, "1", nap, "2")
    for episode in ("idle", "busy", "guilty"):
        result(environments.reset(episode, 3, {}))
        assert result(environments.step(episode, "1")).observation == undisturbed[1]
    busy = environments.step("busy", nap)
    guilty = environments.step("guilty", death)
    assert result(guilty).kind == "died"
    assert result(busy).observation == undisturbed[2]
    assert result(environments.step("busy", "2")).observation == undisturbed[3]
    assert result(environments.step("idle", nap)).observation == undisturbed[2]
    assert result(environments.step("idle", "2")).observation == undisturbed[3]
    assert result(environments.step("guilty", "1")) == result(guilty)


def test_a_hanging_step_fails_its_own_episode(make: Make) -> None:
    environments = make("Counter", timeout=0.5)
    result(environments.reset("good", 1, {}))
    hanging = play(environments, "bad", 1, "do sleep", "1")
    assert hanging[1:] == [Failure("timeout", "it took longer than 0.5 s")] * 2
    assert result(environments.step("good", "1")).reward == 1.0


def test_a_name_is_free_again_after_release(counter: Environments) -> None:
    first = play(counter, "a", 1, "4")
    counter.release("a")
    assert play(counter, "a", 1, "4") == first
    counter.release("a")
    counter.release("never seen")


def test_a_failed_name_is_free_again_after_release(counter: Environments) -> None:
    assert play(counter, "b", 1, "do raise")[1].kind == "raised"
    counter.release("b")
    assert result(counter.reset("b", 2, {})) == "seed 2 {}"


def test_an_episode_takes_one_step_at_a_time(counter: Environments) -> None:
    result(counter.reset("c", 1, {}))
    first, second = counter.step("c", "do nap"), counter.step("c", "1")
    with pytest.raises(RuntimeError, match="c: one call at a time"):
        result(second)
    assert result(first).reward == 0.0


def test_every_instance_is_closed_when_it_is_released_or_all_is_closed(make: Make, tmp_path: Path) -> None:
    environments = make("Closing", {"folder": str(tmp_path)})
    for n in range(3):
        result(environments.reset(f"{n}", n, {}))
    under_way = environments.step("0", "nap")
    environments.release("0")
    environments.release("1")
    assert result(under_way).observation == "nap"
    environments.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2"]


def test_an_environment_that_cannot_be_made_is_a_failure(make: Make) -> None:
    failure = result(make("Fragile").reset("a", 1, {}))
    assert failure.kind == "raised"
    assert failure.message.startswith("RuntimeError: out of licences (user_code.py:")


def test_results_of_the_wrong_shape_are_failures(make: Make) -> None:
    environments = make("Wrong")
    assert result(environments.reset("a", 7, {})).message.endswith("it returned 7")
    assert result(environments.step("a", "('x', 'high', False, {})")).message.startswith(
        "step gave the reward 'high'"
    )
    assert result(environments.step("a", "('x', None, False, {})")) == StepResult("x", None, False, {})
    assert result(environments.step("a", "('x', 1.0)")).message.startswith("step must return")
    assert result(environments.step("a", "('x', 1, True, None)")) == StepResult("x", 1.0, True, {})


def test_lone_surrogates_become_replacement_characters(make: Make) -> None:
    step = make("Wrong").step("a", "('a' + chr(0xD800) + 'b', 1, False, {})")
    assert result(step) == StepResult("a\ufffdb", 1.0, False, {})
    assert read_reset("a\ud800b") == "a\ufffdb"
    assert read_step(["\udfff\U0001f600", 1, False, None]) == StepResult("\ufffd\U0001f600", 1.0, False, {})


def test_a_failure_stops_the_pipeline_where_the_run_file_says_so(make: Make) -> None:
    environments = make("Counter", on_error="stop")
    result(environments.reset("a", 1, {}))
    with pytest.raises(JigsawError, match=r"environment .*user_code.py:Counter failed: ValueError"):
        result(environments.step("a", "do raise"))


def test_a_class_that_is_no_environment_is_refused(make: Make) -> None:
    with pytest.raises(JigsawError, match="class NoStep has no method 'step'"):
        make("NoStep").check()
    with pytest.raises(JigsawError, match="params do not fit Counter"):
        make("Counter", {"begin": 3}).check()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(), inner, max_size=3)),
)


@settings(max_examples=50)
@given(JSON)
def test_whatever_user_code_returns_is_read_without_an_exception(value: Any) -> None:
    assert isinstance(read_reset(value), str | Failure)
    assert isinstance(read_step(value), StepResult | Failure)


@given(st.text(), st.floats(allow_nan=False, allow_infinity=False, width=32), st.booleans(), st.booleans())
def test_four_and_five_values_mean_the_same(text: str, reward: float, ended: bool, cut: bool) -> None:
    assert read_step([text, reward, ended, cut, {}]) == read_step([text, reward, ended or cut, {}])
    assert read_step([text, reward, ended, {"a": 1}]) == StepResult(text, reward, ended, {"a": 1})
