from __future__ import annotations

import datetime
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from jigsawrl.errors import JigsawError
from jigsawrl.model.tokenizer import Tokenizer, load_tokenizer
from jigsawrl.pipeline.chat import Dialogue
from jigsawrl.pipeline.tasks.base import Prompt

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3_LIKE = """\
{{- '<|begin|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}
"""

QWEN3_LIKE = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < last.user and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

LLAMA2_LIKE = """\
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages, please') }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<s>[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + ' </s>' }}{%- endif %}
{%- endfor %}
"""

DATED = """\
{{- 'Today Date: ' + strftime_now('%d %b %Y, %H:%M') + '\\n' }}
{%- for message in messages %}{{- message.role + ': ' + message.content + '<eot>' }}{%- endfor %}
"""

# How Llama 3 and Qwen cut text: newlines stand apart from the word that follows them.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPECIAL = {
    SMOLLM2: ["<|im_end|>", "<|im_start|>"],
    LLAMA3_LIKE: ["<|eot|>", "<|begin|>", "<|start|>", "<|end|>"],
    QWEN3_LIKE: ["<|im_end|>", "<|im_start|>"],
    LLAMA2_LIKE: ["</s>", "<s>"],
    DATED: ["<eot>"],
    None: ["<eos>"],
}


@pytest.fixture(scope="module")
def tokenizer_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Tokenizer]:
    """A byte-level tokenizer with merges across spaces and newlines, and a chat template (or none)."""
    made: dict[str | None, Tokenizer] = {}

    def make(template: str | None) -> Tokenizer:
        if template not in made:
            raw = RawTokenizer(models.BPE())
            raw.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(WORDS), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
            raw.decoder = decoders.ByteLevel()
            text = "user assistant system\n\n\nthe answer is  12\n\nYou guess: [7]\n"
            trainer = trainers.BpeTrainer(
                vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
            )
            raw.train_from_iterator([text] * 3, trainer)
            raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[template]])
            folder = tmp_path_factory.mktemp("tokenizer")
            raw.save(str(folder / "tokenizer.json"))
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[template][0]}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            if template is not None:
                (folder / "chat_template.jinja").write_text(template)
            made[template] = load_tokenizer(folder, trust_remote_code=False)
        return made[template]

    return make


MakeTokenizer = Callable[[str | None], Tokenizer]


def prompt(text: str | None = None, messages: list[dict[str, str]] | None = None) -> Prompt:
    return Prompt(0, text, messages, None, "test", {})


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


texts = st.text(alphabet="abz 12\n[]:é🙂", max_size=12)
answers = texts.map(str.strip)


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3_LIKE, QWEN3_LIKE])
@settings(deadline=None)
@given(opening=texts, turns=st.lists(st.tuples(answers, texts), min_size=1, max_size=3), system=st.booleans())
def test_turn_by_turn_gives_the_tokens_of_the_whole_conversation(
    tokenizer_for: MakeTokenizer,
    template: str,
    opening: str,
    turns: list[tuple[str, str]],
    system: bool,
) -> None:
    tokenizer = tokenizer_for(template)
    dialogue = Dialogue(tokenizer)
    messages = [message("system", "Be brief.")] if system else []
    messages.append(message("user", opening))
    tokens = dialogue.first_tokens(opening, "Be brief." if system else None)
    for answer, observation in turns:
        tokens += [*tokenizer.encode(answer), tokenizer.eos_token_id]
        tokens += dialogue.turn_tokens(observation, tokens[-1])
        messages += [message("assistant", answer), message("user", observation)]
    assert tokens == tokenizer.encode(tokenizer.render(messages))


def test_what_stands_between_two_turns(tokenizer_for: MakeTokenizer) -> None:
    tokenizer = tokenizer_for(SMOLLM2)
    between = Dialogue(tokenizer).turn_tokens("too low", last_token=tokenizer.eos_token_id)
    assert tokenizer.decode(between) == "\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3_LIKE, QWEN3_LIKE, LLAMA2_LIKE])
def test_an_answer_without_its_end_is_ended(tokenizer_for: MakeTokenizer, template: str) -> None:
    """Even where its last token also stands somewhere in the header that follows."""
    tokenizer = tokenizer_for(template)
    dialogue = Dialogue(tokenizer)
    ended = dialogue.turn_tokens("x", tokenizer.eos_token_id)
    for last in tokenizer.encode("\n")[-1], tokenizer.encode("user")[-1], tokenizer.encode("]")[-1]:
        cut = dialogue.turn_tokens("x", last)
        position = cut.index(tokenizer.eos_token_id)
        assert cut[position + 1 :] == ended


def test_an_end_that_only_the_run_file_names_is_not_written_twice(tokenizer_for: MakeTokenizer) -> None:
    """A folder whose eos is not its template's end of turn, run with rollout.stop_token_ids."""
    inner = tokenizer_for(SMOLLM2).inner
    end = inner.convert_tokens_to_ids("<|im_end|>")
    start = inner.convert_tokens_to_ids("<|im_start|>")
    tokenizer = Tokenizer(inner, eos_token_ids=[0], pad_token_id=0)
    assert Dialogue(tokenizer).turn_tokens("x", end).count(end) == 1
    assert Dialogue(tokenizer).turn_tokens("x", 0).count(end) == 2
    assert Dialogue(tokenizer).turn_tokens("x", start).count(end) == 2


def test_reasoning_that_the_template_would_drop_stays(tokenizer_for: MakeTokenizer) -> None:
    tokenizer = tokenizer_for(QWEN3_LIKE)
    dialogue = Dialogue(tokenizer)
    answer = "<think>\n7 is in the middle\n</think>\n\n[7]"
    opening = dialogue.first_tokens("guess", None)
    written = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    tokens = opening + written + dialogue.turn_tokens("too low", written[-1])

    conversation = [message("user", "guess"), message("assistant", answer), message("user", "too low")]
    assert "think" not in tokenizer.render(conversation)
    assert tokens[len(opening) : len(opening) + len(written)] == written
    assert tokenizer.decode(tokens) == (
        "<|im_start|>user\nguess<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
        "<|im_start|>user\ntoo low<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_odd_tokenisation_by_the_model_is_kept(tokenizer_for: MakeTokenizer) -> None:
    tokenizer = tokenizer_for(SMOLLM2)
    spelled = [id for letter in "answer" for id in tokenizer.encode(letter)]
    assert tokenizer.encode("answer") != spelled
    tokens = [*spelled, tokenizer.eos_token_id]
    tokens += Dialogue(tokenizer).turn_tokens("x", tokens[-1])
    assert tokens[: len(spelled)] == spelled


@settings(deadline=None)
@given(observation=texts)
def test_without_a_template_everything_is_verbatim(tokenizer_for: MakeTokenizer, observation: str) -> None:
    tokenizer = tokenizer_for(None)
    dialogue = Dialogue(tokenizer)
    assert tokenizer.decode(dialogue.first_tokens(observation, None)) == observation
    assert tokenizer.decode(dialogue.first_tokens(observation, "Be brief.")) == f"Be brief.\n{observation}"
    assert tokenizer.decode(dialogue.turn_tokens(observation, tokenizer.eos_token_id)) == observation
    assert tokenizer.decode(dialogue.prompt_tokens(prompt(observation))) == observation


def test_prompts_are_plain_text_or_messages(tokenizer_for: MakeTokenizer) -> None:
    tokenizer = tokenizer_for(SMOLLM2)
    dialogue = Dialogue(tokenizer)
    assert tokenizer.decode(dialogue.prompt_tokens(prompt("7+5="))) == "7+5="
    chat = [message("system", "Be brief."), message("user", "7+5=")]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n7+5=<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(dialogue.prompt_tokens(prompt(messages=chat))) == rendered
    begun = [*chat, message("assistant", "The sum is")]
    assert tokenizer.decode(dialogue.prompt_tokens(prompt(messages=begun))) == rendered + "The sum is"


def test_what_a_template_refuses_is_a_clear_error(tokenizer_for: MakeTokenizer) -> None:
    with pytest.raises(JigsawError, match=r"refuses .* system, user: no system messages, please"):
        Dialogue(tokenizer_for(LLAMA2_LIKE)).first_tokens("guess", "Be brief.")


def test_a_prompt_of_nothing_is_a_clear_error(tokenizer_for: MakeTokenizer) -> None:
    dialogue = Dialogue(tokenizer_for(SMOLLM2))
    for empty in prompt(), prompt(messages=[]):
        with pytest.raises(JigsawError):
            dialogue.prompt_tokens(empty)


def test_a_template_writes_the_date_that_it_is_given_and_no_clock(tokenizer_for: MakeTokenizer) -> None:
    tokenizer = tokenizer_for(DATED)
    dialogue = Dialogue(tokenizer, datetime.date(2024, 7, 26))
    expected = tokenizer.encode("Today Date: 26 Jul 2024, 00:00\nuser: hi<eot>")
    assert dialogue.prompt_tokens(prompt(messages=[message("user", "hi")])) == expected
    assert dialogue.first_tokens("hi", None) == expected
    unfinished = [message("user", "hi"), message("assistant", "ho")]
    assert tokenizer.decode(dialogue.prompt_tokens(prompt(messages=unfinished))).startswith(
        "Today Date: 26 Jul"
    )
