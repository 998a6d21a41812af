"""Reward functions of both signatures, in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import FLOAT32_MAX
from jigsawrl.pipeline.rewards import Rewards, Score, as_number
from jigsawrl.pipeline.tasks.base import Prompt, RewardSpec

USER_CODE = Path(__file__).with_name("user_code.py")
PROMPT = Prompt(3, "7+5=", None, "12", "sums", {"answer": "12", "difficulty": 4})
CHAT = Prompt(4, None, [{"role": "user", "content": "7+5?"}], "12", "chat", {"answer": "12", "difficulty": 4})
Make = Callable[..., Rewards]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rewards] = []

    def rewards(name: str, params: dict[str, Any] | None = None, timeout: float = 10, **more: Any) -> Rewards:
        settings = {"on_error": "zero", "processes": 1} | more
        made.append(Rewards(RewardSpec(f"{USER_CODE}:{name}", params or {}, timeout, **settings)))
        return made[-1]

    yield rewards
    for one in made:
        one.close()


def scores(rewards: Rewards, prompt: Prompt, *completions: str) -> list[Score]:
    return rewards.submit(prompt, completions).result(30)


@pytest.mark.parametrize("function", ["compute_score", "compute_score_async"])
def test_each_answer_has_its_own_score(make: Make, function: str) -> None:
    rewards = make(function, processes=2)
    groups = [["12" if (group * sample) % 3 else f"{sample}" for sample in range(8)] for group in range(16)]
    futures = [rewards.submit(PROMPT, group) for group in groups]
    for group, future in zip(groups, futures, strict=True):
        assert [score.value for score in future.result(30)] == [float(text == "12") for text in group]


def test_the_first_signature_gets_the_row_and_the_params(make: Make) -> None:
    rewards = make("what_came", {"weight": 0.5})
    came = scores(rewards, PROMPT, "x")[0].error
    assert came is not None
    assert """['sums', 'x', '12', {'answer': '12', 'difficulty': 4}, 0.5]""" in came


def test_extra_info_is_the_column_of_that_name_where_there_is_one(make: Make) -> None:
    prompt = Prompt(0, "?", None, "12", "sums", {"extra_info": {"index": 9}, "ability": "math"})
    came = scores(make("what_came", {"weight": 1}), prompt, "x")[0].error
    assert came is not None
    assert "{'index': 9}" in came
    assert "ability" not in came


def test_the_numbers_of_a_dict_are_kept_beside_the_score(make: Make) -> None:
    assert scores(make("explain"), PROMPT, "four") == [Score(1.0, None, {"length": 4.0, "flag": 1.0})]


def test_the_second_signature_gets_a_group_with_its_columns_as_lists(make: Make) -> None:
    assert scores(make("by_group"), PROMPT, "12", "13", "12") == [Score(1.0), Score(0.0), Score(1.0)]


def test_the_second_signature_gets_messages_for_a_chat_prompt(make: Make) -> None:
    assert scores(make("by_chat"), CHAT, "ab", "abcd") == [Score(1 + 2 + 4), Score(1 + 4 + 4)]


def test_none_does_not_apply_and_other_values_that_are_no_numbers_are_errors_and_count_zero(
    make: Make,
) -> None:
    none, nan, true, two = scores(make("by_group_async"), PROMPT, "a", "b", "c", "d")
    assert none == Score(None)
    assert nan == Score(0.0, "returned nan, which is not a finite number")
    assert (true, two) == (Score(1.0), Score(2.0))


@pytest.mark.parametrize(
    ("returned", "value"),
    [("True", 1.0), ("3", 3.0), ("{'score': 0.25}", 0.25), ("-1.5", -1.5)]
    + [(bad, None) for bad in ("float('nan')", "float('-inf')", "'1'", "[1.0]", "{}", "10**400")]
    + [(bad, None) for bad in ("{'score': {'score': 1}}", "{'point': 1}")],
)
def test_every_kind_of_result_is_a_score_or_an_error(
    shared: Rewards, returned: str, value: float | None
) -> None:
    (score,) = scores(shared, PROMPT, f"return {returned}")
    assert (score.value, score.error is None) == (value or 0.0, value is not None)


@pytest.mark.parametrize("function", ["compute_score", "compute_score_async"])
@pytest.mark.parametrize("returned", ["None", "{'score': None}", "{'score': None, 'length': 3}"])
def test_none_says_that_the_reward_does_not_apply(make: Make, function: str, returned: str) -> None:
    rewards = make(function, on_error="stop")
    assert scores(rewards, PROMPT, f"return {returned}", "12") == [Score(None), Score(1.0)]


def test_none_beside_a_score_is_left_out(shared: Rewards) -> None:
    returned = "return {'score': 0.5, 'length': None, 'depth': 2}"
    assert scores(shared, PROMPT, returned) == [Score(0.5, None, {"depth": 2.0})]


@pytest.fixture(scope="module")
def shared() -> Iterator[Rewards]:
    rewards = Rewards(RewardSpec(f"{USER_CODE}:compute_score", {}, 10.0, "zero", 1))
    yield rewards
    rewards.close()


def test_failing_answers_are_zero_and_the_others_are_scored(make: Make) -> None:
    rewards = make("compute_score", timeout=0.5)
    raised, right, died, hung, wrong = scores(rewards, PROMPT, "do raise", "12", "do exit", "do sleep", "13")
    assert (right, wrong) == (Score(1.0), Score(0.0))
    assert raised.error is not None
    assert raised.error.startswith("ValueError: a long story")
    assert died == Score(0.0, "its process exited with code 7")
    assert hung == Score(0.0, "it took longer than 0.5 s")


def test_a_list_of_the_wrong_length_is_an_error_for_all(make: Make) -> None:
    found = scores(make("short_list"), PROMPT, "a", "b")
    assert {score.error for score in found} == {
        "must return a list of 2 numbers, one for each completion; returned [1.0]"
    }


def test_a_failure_stops_the_pipeline_where_the_run_file_says_so(make: Make) -> None:
    rewards = make("compute_score", on_error="stop")
    assert scores(rewards, PROMPT, "12") == [Score(1.0)]
    with pytest.raises(JigsawError, match=r"reward .*user_code.py:compute_score failed: ValueError: a long"):
        scores(rewards, PROMPT, "12", "do raise")
    assert scores(rewards, PROMPT, "12") == [Score(1.0)]


def test_a_function_with_neither_signature_is_refused(make: Make) -> None:
    with pytest.raises(JigsawError, match=r"takes \(a, b\); it must be one of\ncompute_score\(data_source"):
        make("neither").check()


def test_a_function_that_wants_a_column_there_is_not_is_refused(make: Make) -> None:
    prompt = Prompt(0, "?", None, "12", "sums", {"solution": "12"})
    with pytest.raises(
        JigsawError, match=r"wants answer, which the data does not have\nIt can have: .*solution"
    ):
        make("by_group").submit(prompt, ["12"])


def test_a_function_that_cannot_be_loaded_is_refused(make: Make) -> None:
    with pytest.raises(JigsawError, match=r"cannot load .*user_code.py:comput_score: .* does not define"):
        make("comput_score").check()


def test_no_answers_have_no_scores(shared: Rewards) -> None:
    assert scores(shared, PROMPT) == []


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text(), st.lists(st.integers())))
def test_only_finite_numbers_are_numbers(value: Any) -> None:
    number = as_number(value)
    if isinstance(value, bool | int | float) and abs(value) <= FLOAT32_MAX:
        assert number == float(value)
    else:
        assert number is None


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1e39", "returned 1e+39, which float32 cannot hold; divide it, so that it is at most 3.4e+38"),
        ("-10**400", "which float32 cannot hold"),
        ("10**5000", "what it returned cannot be sent: ValueError"),
        ("float('-inf')", "returned -inf, which is not a finite number"),
        ("{'score': 1, 'perplexity': 1e308}", "returned for 'perplexity' 1e+308, which float32 cannot hold"),
        ("{'score': 1, 'a\\nb': 2}", "returned a number named 'a\\nb'; the name of a metric has 1 to 100"),
        ("{'score': 1, '\\ud800': 2}", "returned a number named '\\ud800'; the name of a metric"),
        (
            "{'score': 1} | {str(n): n for n in range(5000)}",
            "returned 5000 numbers beside 'score'; at most 256",
        ),
        ("{'score': [1]}", "returned [1], which is not a finite number"),
        ("'1.0'", "returned '1.0', which is not a finite number"),
        ("1j", "what it returned cannot be sent: TypeError: a complex is not JSON"),
        ("__import__('decimal').Decimal(1)", "what it returned cannot be sent: TypeError: a Decimal"),
        ("__import__('builtins').__dict__['exec']('raise ValueError(chr(0xD800))')", "ValueError: \ufffd"),
    ],
)
def test_a_value_that_is_no_reward_is_an_error_of_its_sample_in_one_line(
    shared: Rewards, returned: str, problem: str
) -> None:
    bad, good = scores(shared, PROMPT, f"return {returned}", "12")
    assert (bad.value, bad.extra, good) == (0.0, {}, Score(1.0))
    assert bad.error is not None
    assert problem in bad.error
    assert len(bad.error.splitlines()) == 1
    assert len(bad.error.encode()) < 400


def test_numbers_beside_a_score_that_are_not_finite_are_left_out(shared: Rewards) -> None:
    returned = "return {'score': 3e38, 'length': float('inf'), 'depth': float('nan'), 'all': -3e38}"
    assert scores(shared, PROMPT, returned) == [Score(3e38, None, {"all": -3e38})]
