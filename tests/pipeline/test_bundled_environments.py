"""The bundled environments, played directly; that they run in processes of their own is tested with the pool."""

import asyncio
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.pipeline.environments.calculator import Calculator, calculate
from jigsawrl.pipeline.environments.textarena import TextArena


def play(expression: str, *turns: str) -> list[tuple[str, float, bool]]:
    episode = Calculator()
    episode.reset(seed=0, expression=expression)
    return [asyncio.run(episode.step(turn))[:3] for turn in turns]


# The calculator


def test_a_call_is_answered_and_the_right_answer_rewarded() -> None:
    assert play("17*23", "[17*23]", "=391") == [("\n391\n", 0.0, False), ("", 1.0, True)]


def test_the_bracket_may_be_missing_where_a_stop_string_cut_it_off() -> None:
    assert play("17*23", "Let me see: [17*23")[0] == ("\n391\n", 0.0, False)


def test_a_turn_with_a_call_is_never_an_answer() -> None:
    assert play("2+2", "[2+2] =4")[0] == ("\n4\n", 0.0, False)


@pytest.mark.parametrize(
    "answer", ["=391", "391", " = 391\n", "17*23 is 391.", "It is 391.0", "First 390, no: 391"]
)
def test_the_last_number_of_a_turn_is_the_answer(answer: str) -> None:
    assert play("17*23", answer) == [("", 1.0, True)]


@pytest.mark.parametrize("answer", ["=390", "", "=", "none", "391 or 390", "-391", "3910", "=391.5"])
def test_a_wrong_answer_ends_the_episode_unrewarded(answer: str) -> None:
    assert play("17*23", answer) == [("", 0.0, True)]


def test_negative_and_large_answers_are_understood() -> None:
    assert play("3-20", "3-20=-17") == [("", 1.0, True)]
    assert play("999*999", "=998,001") == [("", 1.0, True)]


@settings(deadline=None)
@given(st.data())
def test_the_tool_computes_exactly(data: st.DataObject) -> None:
    """Against fractions, which know no rounding; only whole results are compared."""
    numbers = st.integers(0, 10**9).map(lambda number: (str(number), Fraction(number)))

    def combine(inner: st.SearchStrategy[tuple[str, Fraction]]) -> st.SearchStrategy[tuple[str, Fraction]]:
        return st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda parts: (
                f"({parts[0][0]} {parts[1]} {parts[2][0]})",
                {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__}[parts[1]](
                    parts[0][1], parts[2][1]
                ),
            )
        )

    text, value = data.draw(st.recursive(numbers, combine, max_leaves=4))
    assert calculate(text) == str(value)
    assert calculate(f"-{text}") == str(-value)


def test_division_and_its_kin_work() -> None:
    assert [calculate(text) for text in ("7/2", "6/2", "7//2", "7%4", "1/3", "0.1+0.2", " 2 * 3 ")] == [
        *["3.5", "3", "3", "3", "0.3333333333", "0.3", "6"]
    ]


@pytest.mark.parametrize(
    "expression",
    [
        *[
            "",
            " ",
            "2+",
            "2**99999999",
            "x",
            "__import__('os')",
            "1 if 1 else 2",
            "1,2",
            "()",
            "(1)(2)",
            "...",
        ],
        *[
            "1=1",
            "0x10",
            "1e9",
            "012",
            "9" * 101,
            "(" * 100,
            "-" * 100,
            "2\x00",
            "٣+٣",
            "1<2",
            "1\n+1",
            "'a'*9",
        ],
    ],
)
def test_what_is_no_expression_is_an_error_for_the_model_to_read(expression: str) -> None:
    assert calculate(expression) == "error: not an expression"
    assert play("1+1", f"[{expression}]") == [("\nerror: not an expression\n", 0.0, False)]


def test_a_division_by_zero_is_an_error_for_the_model_to_read() -> None:
    for expression in ("1/0", "1//0", "1%0", "1/0.0", "1%0.0", "1/(2-2)"):
        assert calculate(expression) == "error: division by zero"


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("0123456789+-*/%(). "), max_size=120) | st.text(max_size=20))
def test_the_tool_says_something_short_about_any_text(text: str) -> None:
    said = calculate(text)
    assert 0 < len(said) <= 200
    assert "\n" not in said


def test_the_delays_of_several_episodes_overlap() -> None:
    """The slow call starts first and ends last: it does not hold the loop."""
    finished = []

    async def episode(name: str, latency: float) -> None:
        calculator = Calculator(latency=latency)
        calculator.reset(seed=0, expression="1+1")
        started = time.monotonic()
        await calculator.step("[1+1]")
        finished.append(name)
        assert time.monotonic() - started >= latency * 0.99

    async def both() -> None:
        await asyncio.gather(episode("slow", 0.2), episode("fast", 0.0))

    asyncio.run(both())
    assert finished == ["fast", "slow"]


def test_jitter_is_bounded_and_the_same_whenever_an_episode_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("jigsawrl.pipeline.environments.calculator.asyncio.sleep", note)
    for seed in (1, 1, 2):
        calculator = Calculator(latency=1.0, latency_jitter=0.5)
        calculator.reset(seed=seed, expression="1+1")
        for _ in range(3):
            asyncio.run(calculator.step("[1+1]"))
    assert all(1.0 <= seconds <= 1.5 for seconds in waited)
    assert waited[:3] == waited[3:6]
    assert len(set(waited)) == 6


# textarena


def bisect(episode: TextArena) -> list[tuple[str, float, bool]]:
    low, high, log = 1, 20, []
    while True:
        guess = (low + high) // 2
        observation, reward, done, _ = episode.step(f"I say [{guess}]")
        log.append((observation, reward, done))
        if done:
            return log
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)


def test_guess_the_number_is_won_by_bisection() -> None:
    for seed in range(20):
        episode = TextArena("GuessTheNumber-v0", {})
        prompt = episode.reset(seed=seed)
        assert prompt.startswith("You are Player 0. You are playing Guess The Number.")
        assert prompt.endswith("Enter your guess.\n")
        *hints, last = bisect(episode)
        assert len(hints) <= 4
        assert all(hint in (HIGHER, LOWER) for hint in hints)
        assert last == ("\n", 1.0, True)


HIGHER = ("\nThe target number is higher.\n", 0.0, False)
LOWER = ("\nThe target number is lower.\n", 0.0, False)


def test_an_observation_repeats_neither_the_prompt_nor_the_models_words() -> None:
    episode = TextArena("GuessTheNumber-v0", {})
    episode.reset(seed=0)
    observation = episode.step("wait, not sure")[0]
    assert observation.startswith("\nYou attempted an invalid move.")
    assert "not sure" not in observation


def test_a_second_invalid_move_ends_the_game_as_the_library_has_it() -> None:
    episode = TextArena("GuessTheNumber-v0", {"max_number": 1000})
    episode.reset(seed=0)
    assert episode.step("[1001]")[1:3] == (0.0, False)
    _, reward, done, info = episode.step("[1001]")
    assert (reward, done, info["invalid_move"]) == (0.0, True, True)
    assert "outside the range" in info["reason"]


def test_games_that_mix_up_reason_and_reward_still_end_with_a_number() -> None:
    episode = TextArena("Countdown-v0", {})
    episode.reset(seed=0)
    assert episode.step("hello")[2] is False
    assert episode.step("hello")[1:3] == (0.0, True)


def test_a_game_is_the_same_alone_and_beside_others() -> None:
    """2048 draws a tile at every move, from a random state that all games of a process share."""
    moves = ["[left]", "[up]", "[right]", "[down]"] * 5

    def start(seed: int) -> TextArena:
        episode = TextArena("2048-v0", {})
        episode.reset(seed=seed)
        return episode

    alone = start(4)
    expected = [alone.step(move) for move in moves]
    first, second = start(4), start(5)
    seen = []
    for move in moves:
        seen.append(first.step(move))
        second.step(move)
        random.random()
    assert seen == expected
    assert len({observation for observation, *_ in seen}) > 10


def test_a_game_leaves_the_random_state_of_the_process_alone() -> None:
    random.seed(1)
    expected = [random.random() for _ in range(3)]
    random.seed(1)
    seen = [random.random()]
    episode = TextArena("2048-v0", {})
    episode.reset(seed=4)
    seen.append(random.random())
    episode.step("[left]")
    assert [*seen, random.random()] == expected


def test_what_a_game_prints_does_not_reach_stdout(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

    plain_step = GuessTheNumberEnv.step

    def chatty_step(self: GuessTheNumberEnv, action: str) -> object:
        print("the secret is", self.game_number)
        return plain_step(self, action)

    monkeypatch.setattr(GuessTheNumberEnv, "step", chatty_step)
    episode = TextArena("GuessTheNumber-v0", {})
    episode.reset(seed=0)
    episode.step("[1]")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "the secret is" in captured.err
