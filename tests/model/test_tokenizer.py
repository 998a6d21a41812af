from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from jigsawrl.errors import JigsawError
from jigsawrl.model.plain_tokenizer import PlainTokenizer
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import StreamDecoder, Tokenizer, load_tokenizer


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", layers=1, hidden=32, heads=2, kv_heads=1, seed=0)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2's kind: characters beyond ASCII are several tokens."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["the cat sat on the mat, über naïve Straße"],
        trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet),
    )
    raw.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    bos = raw.token_to_id("<bos>")
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    folder = tmp_path_factory.mktemp("byte_level")
    raw.save(str(folder / "tokenizer.json"))
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    edit(folder / "generation_config.json", eos_token_id=[raw.token_to_id("<eos>"), 5])
    return load_tokenizer(folder, trust_remote_code=False)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama 2's kind: words carry their space, the first one drops it, and bytes stand in for rare characters."""
    pieces = ["<unk>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("</s>", special=True)])
    folder = tmp_path_factory.mktemp("sentence_piece")
    raw.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>")
    return load_tokenizer(folder, trust_remote_code=False)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(token) for token in ids] + [decoder.finish()]


@settings(deadline=None)
@given(st.text(min_size=1))
def test_streamed_text_is_the_text_and_never_half_a_character(byte_level: Tokenizer, text: str) -> None:
    parts = streamed(byte_level, byte_level.encode(text))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@settings(deadline=None)
@given(st.lists(st.integers(0, 288), max_size=60))
def test_any_tokens_whatever_stream_to_what_they_decode_to(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(byte_level, ids)) == byte_level.decode(ids)


@settings(deadline=None)
@given(st.text(alphabet="ab é🙂", min_size=1))
def test_spaces_at_the_start_of_words_survive_streaming(sentence_piece: Tokenizer, text: str) -> None:
    assert "".join(streamed(sentence_piece, sentence_piece.encode(text))) == text


def test_a_character_appears_with_the_token_that_completes_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂b")
    assert streamed(byte_level, ids) == ["a", "", "", "", "🙂", "b", ""]
    assert streamed(byte_level, ids[:3]) == ["a", "", "", "\ufffd"]


def test_the_engines_stream_shows_special_tokens(byte_level: Tokenizer) -> None:
    push = byte_level.stream()
    assert [push(token) for token in [*byte_level.encode("x"), byte_level.eos_token_id]] == ["x", "<eos>"]


def test_skipped_special_tokens_stream_as_nothing(byte_level: Tokenizer) -> None:
    decoder = StreamDecoder(byte_level, skip_special_tokens=True)
    ids = [*byte_level.encode("x"), byte_level.eos_token_id, *byte_level.encode("y")]
    assert [decoder.push(token) for token in ids] == ["x", "", "y"]


def test_ends_of_answers_come_from_the_tokenizer_and_the_generation_config(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_ids == {byte_level.eos_token_id, 5}
    assert byte_level.decode([byte_level.eos_token_id]) == "<eos>"
    assert byte_level.pad_token_id == byte_level.eos_token_id


def test_encoding_adds_nothing_and_the_prefix_is_known(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("the cat")) == "the cat"
    assert byte_level.decode(byte_level.prefix_ids) == "<bos>"


@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_a_custom_tokenizer_beside_a_qwen2_config_keeps_its_newlines(
    folder: Path, tokenizer_class: str | None
) -> None:
    edit(folder / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    edit(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.decode(tokenizer.encode("12+7=\nab")) == "12+7=\nab"


def test_a_tokenizer_that_is_all_in_its_file_is_taken_from_there(folder: Path) -> None:
    assert isinstance(load_tokenizer(folder, trust_remote_code=False).inner, PlainTokenizer)


def test_a_chat_template_beside_it_is_not_overlooked(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.has_chat_template
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "[hi]"


def test_an_end_that_its_file_does_not_know_is_not_overlooked(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=99)
    edit(folder / "tokenizer_config.json", eos_token="<end>")
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<end>"


def test_further_settings_are_not_overlooked(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=99)
    edit(folder / "tokenizer_config.json", extra_special_tokens=["<think>"])
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert len(tokenizer.encode("<think>")) == 1


@pytest.fixture
def with_code(folder: Path, tmp_path: Path) -> Path:
    """The folder, with a tokenizer class of its own that leaves a mark when it is imported."""
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(tmp_path / 'mark')!r}).touch()\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    edit(
        folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]}
    )
    return folder


def test_code_in_a_model_folder_is_not_run(with_code: Path, tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match="trust_remote_code: true"):
        load_tokenizer(with_code, trust_remote_code=False)
    assert not (tmp_path / "mark").exists()


def test_code_in_a_model_folder_is_run_when_trusted(
    with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    tokenizer = load_tokenizer(with_code, trust_remote_code=True)
    assert type(tokenizer.inner).__name__ == "Own"
    assert (tmp_path / "mark").exists()


def test_a_folder_without_a_tokenizer_is_a_clear_error(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    for place, words in ((folder, "no tokenizer"), (tmp_path / "nowhere", "not a folder")):
        with pytest.raises(JigsawError) as caught:
            load_tokenizer(place, trust_remote_code=False)
        assert words in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"added_tokens": [], "model": {}}'])
def test_a_broken_tokenizer_is_a_clear_error(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(JigsawError, match="no tokenizer that can be read"):
        load_tokenizer(folder, trust_remote_code=False)


def test_broken_settings_are_a_clear_error(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(JigsawError, match="not a JSON object"):
        load_tokenizer(folder, trust_remote_code=False)


def test_a_model_that_never_ends_an_answer_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "generation_config.json", eos_token_id=None)
    with pytest.raises(JigsawError, match="which token ends an answer"):
        load_tokenizer(folder, trust_remote_code=False)
