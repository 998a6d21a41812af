"""YAML in and out: duplicate keys are refused, and 1e-6 is a number as in YAML 1.2.

What a text may hold is bounded: its length, its depth, and how much it comes to once every alias is written out.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from jigsawrl.errors import JigsawError

MOST_VALUES = 100_000
"""Keys and values, those behind aliases counted each time that they are used."""
MOST_DEPTH = 100
LONGEST_NUMBER = 400
"""Characters of a number; 1e308 without an exponent has 309."""
_STANDARD = "tag:yaml.org,2002:"
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "timestamp": "a date"}
_PLAIN = ("null", "bool", "int", "float", "timestamp", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str, most_values: int) -> None:
        super().__init__(text)
        self._most_values = most_values
        self._values = self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if self._depth == MOST_DEPTH:
            raise RecursionError
        before, self._depth = self._values, self._depth + 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._sizes[id(node)] = self._values - before
        elif id(node) in self._sizes:
            self._values += self._sizes[id(node)]
        else:
            raise _refusal(f"*{event.anchor} is used inside of what it stands for", event.start_mark)
        if self._values > self._most_values:
            raise _refusal(f"more than {self._most_values:,} values, aliases included", event.start_mark)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if re.search("[\ud800-\udfff]", node.value):
            raise _refusal("half of a surrogate pair, which is no character; remove it", node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    problem = f"{_short(key.value)} is already given on line {lines[key.value]}; remove one"
                    raise _refusal(problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(_STANDARD)
        if isinstance(node, yaml.ScalarNode) and kind in _KINDS and len(node.value) > LONGEST_NUMBER:
            raise _refusal(f"{_short(node.value)} is too long for {_KINDS[kind]}", node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            problem = f"{_short(node.value)} is not {_KINDS.get(kind, 'a value')}; to make it text, put it in quotes"
            raise _refusal(problem, node.start_mark) from None

    def construct_undefined(self, node: yaml.Node) -> Any:
        tag = node.tag
        shown = f"!!{tag.removeprefix(_STANDARD)}" if tag.startswith(_STANDARD) else tag
        raise _refusal(f"the tag {_short(shown)} has no meaning here; leave it out", node.start_mark)


_Loader.yaml_constructors = {
    **{f"{_STANDARD}{name}": yaml.SafeLoader.yaml_constructors[f"{_STANDARD}{name}"] for name in _PLAIN},
    # '=' and '<<' where they are no keys
    **{f"{_STANDARD}{name}": yaml.SafeLoader.construct_yaml_str for name in ("value", "merge")},
    None: _Loader.construct_undefined,
}


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


def parse(text: str, source: str, most_values: int = MOST_VALUES) -> Any:
    """The value that a YAML text holds; a JigsawError that begins with `source` where it holds none."""
    try:
        return _Loader(text, most_values).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise JigsawError(f"{place}: not valid YAML: {_problem(error)}") from None
    except yaml.reader.ReaderError as error:
        place = f"{source}:{text.count(chr(10), 0, error.position) + 1}"
        raise JigsawError(
            f"{place}: not valid YAML: the character U+{ord(text[error.position]):04X}; remove it"
        ) from None
    except yaml.YAMLError as error:
        raise JigsawError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise JigsawError(f"{source}: nested too deeply to be a run file") from None


def dump(data: Any) -> str:
    """YAML that `parse` reads back as the same value, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else "it"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        return "a tab where only spaces may be; indent with spaces"
    if problem == "mapping values are not allowed here":
        return "a second ':' on the line, or a wrong indentation; put text with ': ' in quotes"
    if isinstance(error, yaml.composer.ComposerError) and "single document" in (error.context or ""):
        return "a second document begins here ('---'); a run file holds one"
    return problem if not error.context else f"{problem} ({error.context})"
