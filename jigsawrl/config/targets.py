"""Finds a name in user code without running it: the file is parsed, never imported."""

from __future__ import annotations

import ast
import difflib
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.regular import read_named

MOST_BYTES = 16 << 20


def target_problem(target: str) -> str | None:
    """Why `file.py:name` or `module:name` is not there; None where it is, or where only running it tells."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        return _file_problem(Path(place), name)
    found = _module_file(place)
    if found is None:
        return f"there is no module {place!r}; install it, or give a file (path/to/file.py:{name})"
    return _file_problem(found, name) if found.suffix == ".py" else None


def _file_problem(path: Path, name: str) -> str | None:
    if not path.exists():
        return f"there is no file {path}"
    if not path.is_file():
        return f"{path} is not a file"
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(read_named(path, MOST_BYTES))
    except SyntaxError as error:
        return f"{path}, line {error.lineno or 1} is not valid Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    except (MemoryError, RecursionError):
        return f"{path} is nested too deeply to be read"
    except JigsawError as error:
        return str(error)
    names = _bound(tree.body)
    if name in names or "*" in names or "__getattr__" in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    defined = [n for n in names if not n.startswith("_")]
    hint = f"did you mean {near[0]!r}?" if near else f"it defines {', '.join(defined[:8]) or 'nothing'}"
    return f"{path} does not define {name!r}; {hint}"


def _module_file(module: str) -> Path | None:
    """The file of a module, found without importing its parents; the folder itself where it has no file."""
    origin, search = None, ["", *sys.path]
    for part in module.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return None
        origin, search = spec.origin, list(spec.submodule_search_locations or [])
    return Path(origin or module)


def _bound(body: list[ast.stmt]) -> dict[str, None]:
    """Names that the statements of a module bind at its top level, in their order; `*` for a star import."""
    names: dict[str, None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(dict.fromkeys((a.asname or a.name).split(".")[0] for a in node.names))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            names.update(dict.fromkeys(n.id for n in stored))
        else:
            for block in ("body", "orelse", "finalbody"):
                names.update(_bound(getattr(node, block, [])))
            for branch in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                names.update(_bound(branch.body))
    return names
