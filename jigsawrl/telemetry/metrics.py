"""The figures of every step: metrics.jsonl always, TensorBoard and Weights & Biases where asked.

metrics.jsonl has one line a step, {"step": 3, "reward/mean": 0.5, ...}, each step at most once and in order, however
often the run was killed and resumed.
"""

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, SupportsFloat

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.telemetry import jsonl

METRICS_FILE = "metrics.jsonl"


class _Sink(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes each step's figures before log() returns: a kill afterwards cannot lose them.

    `resume_step` is the last step that is done; what the files say about later ones is dropped. None: the run starts
    anew, and nothing that an earlier attempt left in the folder counts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = True,
        wandb: dict[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        path = folder / METRICS_FILE
        if path.exists():
            _drop_after(path, resume_step)
        self._sinks: list[_Sink] = []
        if tensorboard:
            self._sinks.append(_open_tensorboard(folder / "tensorboard", resume_step))
        if wandb is not None:
            self._sinks.append(_Wandb(folder, wandb, anew=resume_step is None))
        self._lines = jsonl.LineFile(path)

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Takes anything that float() takes. NaN and infinities are logged as such, in JSON as null and by name."""
        plain = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        self._lines.append(jsonl.encode({"step": step, **plain}))
        for sink in self._sinks:
            sink.log(step, plain)

    def close(self) -> None:
        """Idempotent."""
        self._lines.close()
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_after(path: Path, step: int | None) -> None:
    last = -math.inf if step is None else step
    lines = list(jsonl.read(path))
    kept = [line for line, record in lines if record.get("step", math.inf) <= last]
    if len(kept) < len(lines):
        durable.replace(path, b"".join(kept))


def _open_tensorboard(folder: Path, resume_step: int | None) -> _Sink:
    try:
        from jigsawrl.telemetry.tensorboard import TensorBoard
    except ImportError as error:
        raise JigsawError(
            f"TensorBoard files need tensorboardX ({error}): pip install tensorboardX,\n"
            "or set telemetry.tensorboard to false"
        ) from error
    return TensorBoard(folder, purge_step=0 if resume_step is None else resume_step + 1)


class _Wandb:
    """One W&B run per run folder: its id is kept there, and a resumed run goes on with it.

    W&B's own step only ever grows, so ours is a metric that the others are drawn against; steps that are repeated
    after a kill are there twice.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, anew: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise JigsawError(
                'telemetry.wandb needs the wandb package: pip install "jigsawrl[wandb]"'
            ) from error
        id_file = folder / "wandb" / "run-id"
        if anew or not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(id_file, secrets.token_hex(4).encode())
        options = {"name": folder.name, **settings}
        try:
            self._run = wandb.init(dir=str(folder), id=id_file.read_text(), resume="allow", **options)
        except wandb.Error as error:
            raise JigsawError(
                f"W&B did not start: {error}\nRun `wandb login`, or set WANDB_MODE=offline in the environment"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
