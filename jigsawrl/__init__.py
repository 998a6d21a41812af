"""jigsawrl runs many LLM reinforcement-learning jobs on the GPUs of one."""

from typing import TYPE_CHECKING, Any

from jigsawrl.errors import JigsawError

if TYPE_CHECKING:
    from jigsawrl.api import train
    from jigsawrl.config import RunConfig, load_run_file

__version__ = "0.1.0"
__all__ = ["JigsawError", "RunConfig", "__version__", "load_run_file", "train"]

_HOMES = {"train": "jigsawrl.api", "RunConfig": "jigsawrl.config", "load_run_file": "jigsawrl.config"}


def __dir__() -> list[str]:
    """With what is loaded when it is asked for."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is asked for, so that `import jigsawrl` costs nothing."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'jigsawrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
