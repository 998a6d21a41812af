"""YAML in and out: duplicate keys are refused, and 1e-6 is a number as in YAML 1.2."""

from __future__ import annotations

import re
from typing import Any

import yaml

from jigsawrl.errors import JigsawError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            self._refuse_duplicates(node)
        return super().construct_mapping(node, deep=deep)

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    problem = f"{key.value!r} is already given on line {lines[key.value]}; remove one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    """Quotes and escapes what would not come back the same: line breaks of all kinds, control characters."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str, source: str) -> Any:
    """The value that a YAML text holds; a JigsawError that begins with `source` where it holds none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise JigsawError(f"{place}: not valid YAML: {_problem(error)}") from None
    except yaml.YAMLError as error:
        raise JigsawError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise JigsawError(f"{source}: nested too deeply to be a run file") from None
    except ValueError as error:  # such as the date 2024-13-45
        raise JigsawError(f"{source}: not valid YAML: {error}; put the value in quotes") from None


def dump(data: Any) -> str:
    """YAML that `parse` reads back as the same value, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        return "a tab where only spaces may be; indent with spaces"
    if problem == "mapping values are not allowed here":
        return "a second ':' on the line, or a wrong indentation; put text with ': ' in quotes"
    if isinstance(error, yaml.composer.ComposerError) and "single document" in (error.context or ""):
        return "a second document begins here ('---'); a run file holds one"
    return problem if not error.context else f"{problem} ({error.context})"
