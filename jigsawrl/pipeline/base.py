"""Where the model is that a pipeline starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig


def base_folder(config: RunConfig, out: Path) -> Path:
    """The user's folder, or that of a tiny model, made once in the run folder."""
    return out / "base" if config.model.path == "tiny" else Path(config.model.path)
