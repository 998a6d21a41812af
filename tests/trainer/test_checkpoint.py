import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.trainer.checkpoint import Checkpoint, CheckpointStore

FINGERPRINT = {"model": "tiny", "seed": 0}
Tensors = dict[str, dict[str, torch.Tensor]]


def store(folder: Path, keep: int = 2, **changes: Any) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep, {**FINGERPRINT, **changes})


def tensors(step: int) -> Tensors:
    weight = torch.arange(1000, dtype=torch.float32) * step
    return {
        "model": {"weight": weight, "bias": weight[:10].bfloat16()},
        "optimizer": {"step": torch.tensor(step)},
    }


def save(folder: Path, *steps: int, keep: int = 2, **changes: Any) -> None:
    for step in steps:
        store(folder, keep, **changes).save(step, tensors(step), {"step": step})


def load(folder: Path, **changes: Any) -> tuple[Checkpoint | None, list[str]]:
    refused: list[str] = []
    return store(folder, **changes).load_latest(refused.append), refused


def assert_is_of_its_step(loaded: Checkpoint | None, step: int, expected: Tensors) -> None:
    assert loaded is not None
    assert (loaded.step, loaded.state) == (step, {"step": step})
    assert_equal(loaded.tensors, expected)


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].keys() == right[name].keys()
        for key in left[name]:
            assert left[name][key].dtype == right[name][key].dtype
            torch.testing.assert_close(left[name][key], right[name][key], rtol=0, atol=0, equal_nan=True)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_the_newest_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, [])
    save(tmp_path, 5, 10)
    loaded, refused = load(tmp_path)
    assert_is_of_its_step(loaded, 10, tensors(10))
    assert refused == []
    assert loaded is not None
    assert loaded.path == tmp_path / "checkpoints" / "step-000010"


def test_a_checkpoint_holds_safetensors_and_json_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files = sorted(path.name for path in (tmp_path / "checkpoints" / "step-000001").iterdir())
    assert files == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def test_tensors_of_every_kind_come_back_exactly(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    flat = torch.arange(20.0)
    odd = {
        "base": base,
        "tied": base,
        "parameter": torch.nn.Parameter(base),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "first_part": flat[:10],
        "second_part": flat[10:],
        "overlapping": flat[5:15],
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "bits": torch.tensor([True, False]),
        "bytes": torch.arange(256).to(torch.uint8),
        "large": torch.tensor([2**62 + 1]),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
    }
    store(tmp_path).save(1, {"odd": odd, "none": {}}, {})
    loaded, _ = load(tmp_path)
    assert loaded is not None
    assert_equal(loaded.tensors, {"odd": odd, "none": {}})
    assert torch.equal(torch.signbit(loaded.tensors["odd"]["special"]), torch.signbit(odd["special"]))


def test_training_on_with_loaded_tensors_does_not_touch_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    loaded, _ = load(tmp_path)
    assert loaded is not None
    loaded.tensors["model"]["weight"].add_(1)
    assert_is_of_its_step(load(tmp_path)[0], 1, tensors(1))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_state_comes_back_exactly(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder)).save(1, {}, state)
        loaded, _ = load(Path(folder))
        assert loaded is not None
        assert loaded.state == state


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 999_999, 1_000_000, keep=3)
    assert names(tmp_path) == ["step-000002", "step-1000000", "step-999999"]
    assert_is_of_its_step(load(tmp_path)[0], 1_000_000, tensors(1_000_000))
    with pytest.raises(ValueError, match="at least one"):
        store(tmp_path, keep=0)


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3, keep=1)
    store(tmp_path, keep=1).save(3, {"model": {"x": torch.ones(2)}}, {"step": 3})
    assert_is_of_its_step(load(tmp_path)[0], 3, {"model": {"x": torch.ones(2)}})
    assert names(tmp_path) == ["step-000003"]


def test_the_order_of_writing_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then their folder, then the new name's folder are synced, and only then an older one is deleted."""
    log: list[str] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def name(path: Any) -> str:
        return os.path.relpath(path, tmp_path / "checkpoints")

    def logged_fsync(descriptor: int) -> None:
        log.append(f"sync {name(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def logged_rename(path: Path, target: Path) -> Path:
        log.append(f"rename {name(path)} {name(target)}")
        return rename(path, target)

    def logged_rmtree(path: Path, ignore_errors: bool) -> None:
        if path.exists():
            log.append(f"delete {name(path)}")
        rmtree(path, ignore_errors=ignore_errors)

    save(tmp_path, 1, keep=1)
    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    monkeypatch.setattr(shutil, "rmtree", logged_rmtree)
    save(tmp_path, 2, keep=1)
    assert log == [
        "sync .tmp-step-000002/model.safetensors",
        "sync .tmp-step-000002/optimizer.safetensors",
        "sync .tmp-step-000002/state.json",
        "sync .tmp-step-000002/manifest.json",
        "sync .tmp-step-000002",
        "rename .tmp-step-000002 step-000002",
        "sync .",
        "rename step-000001 .tmp-step-000001",
        "delete .tmp-step-000001",
    ]


def damaged(path: Path, damage: str) -> None:
    model = path / "model.safetensors"
    content = bytearray(model.read_bytes())
    if damage == "missing":
        model.unlink()
    elif damage == "short":
        model.write_bytes(content[:-1])
    elif damage == "bit":
        content[-7] ^= 1
        model.write_bytes(content)
    elif damage == "state":
        (path / "state.json").write_text('{"step": 7}')
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    elif damage == "half a manifest":
        manifest = (path / "manifest.json").read_bytes()
        (path / "manifest.json").write_bytes(manifest[: len(manifest) // 2])
    elif damage == "endless step":
        manifest = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(manifest.replace('"step": 9', '"step": 1e999'))
    elif damage == "deep":
        (path / "manifest.json").write_text("[" * 100_000)
    elif damage == "moved":
        path.rename(path.with_name("step-000077"))
    elif damage == "newer":
        (path / "manifest.json").write_text('{"format": 99, "step": 9, "fingerprint": {}, "blobs": []}')
    elif damage == "outside":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace("model.safetensors", "../../model.safetensors"))
    elif damage == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("missing", "step-000009 is not used: it is torn, model.safetensors is missing"),
        ("short", r"it is torn, model.safetensors has \d+ bytes instead of \d+"),
        ("bit", r"it is torn, the content of model.safetensors has changed \(its digest differs\)"),
        ("state", "it is torn, the content of state.json has changed"),
        ("no manifest", "it is torn, manifest.json is missing"),
        ("half a manifest", "it is torn, manifest.json is damaged"),
        ("outside", "it is torn, manifest.json is damaged"),
        ("endless step", "it is torn, manifest.json is damaged"),
        ("deep", "it is torn, manifest.json is damaged"),
        ("moved", "step-000077 is not used: it is of step 9, which is not what its name says"),
        ("newer", "it has format 99, of a newer jigsawrl; this one reads 2"),
        ("link", "it is a link or a file, not a folder"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_reason_and_the_one_before_it_used(
    tmp_path: Path, damage: str, why: str
) -> None:
    save(tmp_path, 8, 9)
    damaged(tmp_path / "checkpoints" / "step-000009", damage)
    loaded, refused = load(tmp_path)
    assert_is_of_its_step(loaded, 8, tensors(8))
    assert len(refused) == 1
    assert str(tmp_path) in refused[0]
    assert re.search(why, refused[0])


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    save(tmp_path, 8)
    save(tmp_path, 9, model="other", lora=[1, 2])
    loaded, refused = load(tmp_path)
    assert_is_of_its_step(loaded, 8, tensors(8))
    [message] = refused
    assert "of another run, lora was [1, 2] and is None, model was 'other' and is 'tiny'" in message


def test_a_fingerprint_is_compared_as_json(tmp_path: Path) -> None:
    save(tmp_path, 1, betas=(0.9, 0.99))
    assert_is_of_its_step(load(tmp_path, betas=[0.9, 0.99])[0], 1, tensors(1))


def test_when_no_checkpoint_is_good_that_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 8, 9)
    for name in names(tmp_path):
        damaged(tmp_path / "checkpoints" / name, "missing")
    refused: list[str] = []
    with pytest.raises(
        JigsawError, match=r"nothing in .*checkpoints can be resumed from.*step-000009.*missing"
    ):
        store(tmp_path).load_latest(refused.append)
    assert len(refused) == 2


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 4, seed=7)
    folder = tmp_path / "checkpoints"
    (folder / "step-000001").symlink_to(folder / "step-000004")
    (folder / "step-000002").mkdir()
    (folder / "step-000003").write_text("a file")
    (folder / ".tmp-step-000009").write_text("a file")
    (folder / "best").mkdir()
    strange = names(tmp_path)
    save(tmp_path, 5, 6, 7, keep=1)
    assert names(tmp_path) == sorted([*strange, "step-000007"])
    assert_is_of_its_step(load(tmp_path)[0], 7, tensors(7))


def test_what_is_not_ours_but_has_the_name_that_is_needed_stays_under_another(tmp_path: Path) -> None:
    save(tmp_path, 4, seed=7)
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-000004", "step-000004.not-ours-1"]
    assert_is_of_its_step(load(tmp_path)[0], 4, tensors(4))
    save(tmp_path, 4, seed=7)
    assert names(tmp_path) == ["step-000004", "step-000004.not-ours-1", "step-000004.not-ours-2"]


def test_a_torn_later_checkpoint_does_not_push_out_the_new_ones(tmp_path: Path) -> None:
    save(tmp_path, 8, 20)
    damaged(tmp_path / "checkpoints" / "step-000020", "bit")
    save(tmp_path, 9, 10, keep=1)
    assert names(tmp_path) == ["step-000010", "step-000020"]
    loaded, refused = load(tmp_path)
    assert_is_of_its_step(loaded, 10, tensors(10))
    assert len(refused) == 1
    save(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["step-000020"]
    assert_is_of_its_step(load(tmp_path)[0], 20, tensors(20))


def test_saving_clears_away_what_a_killed_save_left(tmp_path: Path) -> None:
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    (folder / "step-000002").rename(folder / ".old-step-000002")
    for leftover in (".tmp-step-000002", ".tmp-step-000003", ".old-step-000003"):
        (folder / leftover).mkdir()
        (folder / leftover / "rubbish").touch()
    (folder / "step-000003").mkdir()
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000003.not-ours-1"]
    assert "rubbish" not in os.listdir(folder / "step-000003")
    damaged(folder / "step-000003", "missing")
    assert_is_of_its_step(load(tmp_path)[0], 2, tensors(2))


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """A disk that is full, as far as the writer can tell: the write that passes the limit fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("limit", "state"), [(1000, {}), (8000, {"long": "x" * 9000})])
def test_a_full_disk_is_an_error_for_the_user_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, limit: int, state: dict[str, Any]
) -> None:
    save(tmp_path, 1, keep=1)
    with (
        files_limited_to(limit),
        pytest.raises(JigsawError, match=r"step 2 could not be written .*File too large"),
    ):
        store(tmp_path, keep=1).save(2, tensors(2), state)
    assert names(tmp_path) == ["step-000001"]
    assert_is_of_its_step(load(tmp_path)[0], 1, tensors(1))
    save(tmp_path, 2, keep=1)
    assert_is_of_its_step(load(tmp_path)[0], 2, tensors(2))


# Imports once, then for each line of its input, FOLDER FIRST_STEP EVENTS, forks a process that saves every step
# twice until it is killed: by itself at that file operation, or, with EVENTS 0, by whoever reads its output.
SAVER = """
import os, signal, sys
from pathlib import Path
import torch
from jigsawrl.trainer.checkpoint import CheckpointStore

torch.set_num_threads(1)
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # One write: never half a line.

def tensors(step):
    return {"model": {"weight": torch.full((100, 1000), float(step))}}

for line in iter(sys.stdin.readline, ""):
    folder, step, events = line.split()[0], *map(int, line.split()[1:])
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        say("dead")
        continue
    say(os.getpid())
    seen = 0

    def hook(event, arguments):
        global seen
        if event in OPERATIONS:
            seen += 1
            if seen == events:
                os.kill(os.getpid(), signal.SIGKILL)
            if not events:
                say("busy")

    sys.addaudithook(hook)
    store = CheckpointStore(Path(folder) / "checkpoints", 1, {"model": "tiny", "seed": 0})
    while True:
        for _ in range(2):
            store.save(step, tensors(step), {"step": step})
            say("saved", step)
        step += 1
os._exit(0)
"""


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """In memory where that is possible: a kill leaves the same there, and syncing takes no time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def savers() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", SAVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def last_saved_before_kill(
    savers: "subprocess.Popen[str]", folder: Path, first: int, *, events: int = 0, lines: int = 0
) -> int:
    """Lets a saver run until it kills itself, or kills it after so many lines of output."""
    assert savers.stdin is not None
    assert savers.stdout is not None
    print(folder, first, events, file=savers.stdin, flush=True)
    pid, saved = int(savers.stdout.readline()), first - 1
    for count, line in enumerate(iter(savers.stdout.readline, "dead\n"), 1):
        assert line, "the savers are gone"
        if line.startswith("saved"):
            saved = int(line.split()[1])
        if count == lines:
            os.kill(pid, signal.SIGKILL)
    return saved


def step_after_kill(folder: Path, saved: int) -> int:
    """The step of the checkpoint that is left, which is whole, and not older than the last that was saved."""
    loaded, refused = load(folder)
    assert refused == []
    if saved == 0 and loaded is None:
        return 0
    assert loaded is not None
    assert loaded.step in (saved, saved + 1)
    assert all(name.startswith("step-") for name in names(folder))
    weight = torch.full((100, 1000), float(loaded.step))
    assert_is_of_its_step(loaded, loaded.step, {"model": {"weight": weight}})
    return loaded.step


def test_killed_at_every_file_operation_a_good_checkpoint_remains(
    quick_folder: Path, savers: "subprocess.Popen[str]"
) -> None:
    """Through a first save, one that replaces it, and one that makes it old."""
    saved, event = 0, 0
    while saved < 2:
        event += 1
        folder = quick_folder / str(event)
        saved = last_saved_before_kill(savers, folder, 1, events=event)
        step = step_after_kill(folder, saved)
        save(folder, step + 1, keep=1)
        assert names(folder) == [f"step-{step + 1:06d}"]
    assert event > 40


def test_killed_at_random_moments_a_good_checkpoint_remains(
    quick_folder: Path, savers: "subprocess.Popen[str]"
) -> None:
    moments, step = random.Random(), 0
    for _ in range(15):
        saved = last_saved_before_kill(savers, quick_folder, step + 1, lines=moments.randint(1, 60))
        step = step_after_kill(quick_folder, saved)
    assert step > 0
