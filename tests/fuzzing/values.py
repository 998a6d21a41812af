"""Nasty values, and functions that damage a tree of lists and mappings, or a text."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import math
import random
from typing import Any

import yaml

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 64, 1000, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 2**70, -(2**70), 10**400),
    *(0.0, -0.0, 0.5, -0.5, 1.0, 1e-320, 1e-9, 1e9, 1e39, 1e308, -1e308, math.inf, -math.inf, math.nan),
)
_ODD_TEXTS = r"""
null true yes 1 -1 1e9 0x10 1_000 {} [] = << *a &a !!int % ~ / . .. ../.. a/b ~nobodyhere/x C:\x /dev/zero /dev/full
/proc/self/mem 2026-13-45 2026-11-19 tiny auto cpu a.b=c x.py:f os:system a:b:c con.yaml é 🧩 ﬀ ٣ a,b [red] {a} %s
"""
TEXTS = (
    *_ODD_TEXTS.split(),
    *("", " ", "\n", "a\nb", "\t", "\0", "\x1b[31m", "a\u2028b", "\ufeff", "x" * 300, "x" * 5000),
)
OTHERS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        [{}],
        [None],
        [1] * 1000,
        ["a", "a"],
        {"": ""},
        {"a": {"b": {"c": 1}}},
    ),
    *(datetime.date(2026, 11, 19), {"path": "x"}, {"kind": "data"}, {"kind": 3}, {"path": ["x"]}),
)
_PAIRS = tuple(itertools.pairwise("abcdefghij"))
_ODD_PIECES = r"""
!!timestamp x | !!bool maybe | !!int '' | !!int x | !!float x | !!float '' | !!binary ? | !!set {a, b}
!!null x | !!omap [a: 1, b: 2] | !!omap x | !!pairs [a: 1] | !!pairs [[a, b]] | !!set [a] | !!str {a: b}
!!map [a] | !!seq {a: b} | !!merge x | !!value x | !!python/object:os.system {} | !x y | ! y | !!str | =
!<tag:yaml.org,2002:int> x | 0x | 0b | 0o | 0b_ | -0x_ | 0x_f | 1__0 | _1 | 0_ | .inf | -.INF | .nan | 1e999
-1e999 | 1.e+5 | . | 190:20:30.15 | 2026-13-45 | 2026-02-30 | 2026-11-19T25:61:61Z
2026-11-19 10:00:00 +99:99 | 0000-00-00 | &a [*a] | &a {b: *a} | *nowhere | {<<: 3} | {<<: [a, b]}
{<<: {a: 1}} | &a {<<: *a} | {? [a] : b} | {? {a: b} : c} | {1: a, 2.5: b, null: c, true: d} | {a: 1, a: 2}
[[[[[[[[]]]]]]]] | "\ud800" | "\0" | "\xff" | ' | " | { | ] | - a | a: b: c | @x | ` | %TAG | --- | ...
# x | ? | > | & | * | !
"""
SNIPPETS = (
    *(piece.strip() for line in _ODD_PIECES.strip().split("\n") for piece in line.split(" | ")),
    *(
        "|\n",
        "\t",
        "\x85",
        "0x" + "f" * 5000,
        "0b" + "1" * 20000,
        "0" + "7" * 9000,
        "9" * 5000,
        "1" + ":59" * 3000,
    ),
    "[" * 2000 + "]" * 2000,
    "{a: " * 700 + "1" + "}" * 700,
    "[&a x" + "".join(f", &{b} [{', '.join(['*' + a] * 9)}]" for a, b in _PAIRS) + "]",
    "[&a {z: 1}" + "".join(f", &{b} {{<<: [{', '.join(['*' + a] * 9)}]}}" for a, b in _PAIRS) + "]",
)
"""Pieces of YAML."""
_MARK = "the-snippet-goes-here"


def nasty(rng: random.Random) -> Any:
    """A value that does not belong where it is put, most probably."""
    value = rng.choice(rng.choice((NUMBERS, TEXTS, OTHERS)))
    return copy.deepcopy(value)


def snippet(rng: random.Random) -> str:
    """A piece of YAML that is hard to read."""
    return rng.choice(SNIPPETS)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    return found


def damaged(rng: random.Random, tree: Any, most: int = 2) -> Any:
    """A copy of a tree with one to `most` places changed; the tree may become something else altogether."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, most)):
        if rng.random() < 0.02 or not (where := places(tree)):
            return nasty(rng)
        _damage(rng, *rng.choice(where), where)
    return tree


_WAYS = (
    *("near", "near", "near", "near", "replace", "replace", "replace"),
    *("delete", "add", "nest", "deep", "other", "number"),
)


def _damage(rng: random.Random, holder: Any, key: Any, where: list[tuple[Any, Any]]) -> None:
    match rng.choice(_WAYS):
        case "replace":
            holder[key] = nasty(rng)
        case "delete":
            del holder[key]
        case "add" if isinstance(holder, dict):
            name = rng.choice((*TEXTS, *(str(other) for _, other in where)))
            holder[name] = rng.choice((copy.deepcopy(holder[key]), nasty(rng)))
        case "add":
            holder.insert(key, rng.choice((copy.deepcopy(holder[key]), nasty(rng))))
        case "nest":
            holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 3))
        case "deep":
            for _ in range(rng.choice((5, 50, 150))):
                holder[key] = rng.choice(([holder[key]], {"a": holder[key]}))
        case "other":
            other, its = rng.choice(where)
            value = copy.deepcopy(other[its] if its in other or isinstance(other, list) else None)
            holder[key] = value
        case "near" if isinstance(number := holder[key], int | float) and abs(number) < 1e300:
            holder[key] = rng.choice((number * 2, number + 1, number - 1, -number, rng.randint(0, 40)))
        case "number" if isinstance(holder[key], int | float):
            holder[key] = rng.choice(NUMBERS)
        case _:
            holder[key] = str(holder[key])[:1000]


def damaged_bytes(rng: random.Random, data: bytes, most: int = 3) -> bytes:
    """Bytes with one to `most` changes: flipped, cut off, cut out, doubled, something put in."""
    for _ in range(rng.randint(1, most)):
        at = rng.randint(0, len(data))
        end = min(len(data), at + rng.choice((1, 1, 2, 5, 40, 400)))
        match rng.choice(("flip", "cut off", "cut out", "double", "put in", "shuffle")):
            case "flip" if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case "cut off" if rng.random() < 0.3:
                data = data[:at]
            case "cut out":
                data = data[:at] + data[end:]
            case "double":
                data = data[:end] + data[at:end] * rng.choice((1, 1, 3, 30)) + data[end:]
            case "shuffle":
                piece = bytearray(data[at:end])
                rng.shuffle(piece)
                data = data[:at] + piece + data[end:]
            case _:
                data = data[:at] + _odd_bytes(rng) + data[at:]
    return data


def _odd_bytes(rng: random.Random) -> bytes:
    text = rng.choice((rng.choice(TEXTS), snippet(rng), json.dumps(str(nasty(rng))[:100])))
    odds = (b"\xff", b"\xfe\xff", b"\xed\xa0\x80", b"\0", b"\r", b"\n", b"\n\n", b"\xef\xbb\xbf", b"\xc2\x85")
    return rng.choice((text.encode("utf-8", "surrogatepass"), rng.choice(odds)))


def as_json(rng: random.Random, tree: Any) -> bytes:
    """A tree as JSON, at times damaged as text too."""
    data = json.dumps(tree, default=str, skipkeys=True).encode()
    return damaged_bytes(rng, data, 1) if rng.random() < 0.1 else data


def as_yaml(rng: random.Random, tree: Any) -> bytes:
    """A tree as YAML; one value of it may be an odd piece of YAML, and the text may be damaged too."""
    odd = rng.random() < 0.35
    if odd and (where := places(tree)):
        holder, key = rng.choice(where)
        holder[key] = _MARK
    block = rng.random() < 0.5
    text = yaml.dump(
        tree, Dumper=_Dumper, default_flow_style=not block, allow_unicode=True, sort_keys=False, width=10**6
    )
    if odd:
        text = text.replace(_MARK, snippet(rng))
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        data = damaged_bytes(rng, data)
    if rng.random() < 0.02:
        data = text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1")), "replace")
    return data


class _Dumper(yaml.CSafeDumper if hasattr(yaml, "CSafeDumper") else yaml.SafeDumper):
    pass
