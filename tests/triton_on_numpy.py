"""Triton's and Gluon's languages on numpy, so that the kernels of `engine/cuda` run where there is no GPU.

Programs run one after the other, in any order; those of products with adapters in that of their numbers, for they
wait for earlier ones. Memory is that of tensors on the CPU. So what kernels compute is held to, and the code that
launches them, but not how they wait: copies are done at once, barriers are always passed, and a launch ends before
the next one begins. Integers are wide, and tensors have no layouts.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MOST_POLLS = 10_000
"""Of something that an earlier program must have done: nobody will do it later."""
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
"""Of a launch, that no kernel has as an argument."""
WAITS = "RANKS"
"""The argument without which no program waits for another."""
UNKNOWN = 1 << 30
"""Numbers behind an address of which nothing else is known."""
ROUNDED = "bfloat16"
"""Numbers that are kept as float32 of which half the bits are zero."""
KINDS = {"int32": np.int64, "int64": np.int64, "uint64": np.uint64, "float32": np.float32}
"""Indices are wide enough for everybody."""
BITS = {"int32": np.int32, "uint64": np.uint64}


def rounded(x: NDArray[Any]) -> NDArray[np.float32]:
    """To the nearest number that bfloat16 has."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().float().numpy().reshape(x.shape)


def plain(x: Any) -> Any:
    return x.values if isinstance(x, Block) else x


def operator(compute: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Block, Any], Block]:
    def apply(self: Block, other: Any) -> Block:
        left, right = self.values, plain(other)
        return Block(compute(right, left) if swapped else compute(left, right))

    return apply


class Block:
    """A tensor of a program, or one of its numbers."""

    def __init__(self, values: Any, kind: str | None = None) -> None:
        values = np.asarray(values)
        self.values = values.astype(np.float32) if values.dtype == np.float64 else values
        self.dtype = kind or self.values.dtype.name

    __add__ = __radd__ = operator(np.add)
    __sub__, __rsub__ = operator(np.subtract), operator(np.subtract, swapped=True)
    __mul__ = __rmul__ = operator(np.multiply)
    __truediv__, __rtruediv__ = operator(np.divide), operator(np.divide, swapped=True)
    __floordiv__, __mod__ = operator(np.floor_divide), operator(np.mod)
    __lt__, __le__, __gt__, __ge__ = map(operator, (np.less, np.less_equal, np.greater, np.greater_equal))
    __eq__ = operator(np.equal)  # type: ignore[assignment]
    __ne__ = operator(np.not_equal)  # type: ignore[assignment]
    __and__ = __rand__ = operator(np.bitwise_and)
    __or__ = __ror__ = operator(np.bitwise_or)
    __xor__ = operator(np.bitwise_xor)
    __hash__ = None  # type: ignore[assignment]

    def __rshift__(self, places: int) -> Block:
        return Block(self.values >> self.values.dtype.type(places))

    def __neg__(self) -> Block:
        return Block(-self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def __index__(self) -> int:
        return int(self.values)

    def __getitem__(self, place: Any) -> Block:
        return Block(self.values[place], self.dtype)

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        if isinstance(kind, PointerType):
            return Pointer.at(int(self.values), kind.kind)
        if bitcast:
            return Block(np.ascontiguousarray(self.values).view(BITS[kind]).reshape(self.values.shape))
        return Block(rounded(self.values) if kind == ROUNDED else self.values.astype(KINDS[kind]), kind)

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.values.reshape(shape), self.dtype)

    def permute(self, order: list[int]) -> Block:
        return Block(self.values.transpose(order), self.dtype)

    def split(self) -> tuple[Block, Block]:
        return Block(self.values[..., 0]), Block(self.values[..., 1])

    def index(self, place: Any) -> Block:
        """Of shared memory: writing there changes this."""
        return Block(self.values[int(place)], self.dtype)

    def load(self, layout: Any) -> Block:
        return Block(self.values.copy(), self.dtype)


@dataclass(frozen=True)
class PointerType:
    kind: str


class Pointer:
    """Into a tensor's memory."""

    def __init__(self, memory: NDArray[Any], rounded: bool, place: Any = 0) -> None:
        self.memory, self.rounded, self.place = memory, rounded, place

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        size, kind = tensor.element_size(), tensor.dtype
        count = tensor.untyped_storage().nbytes() // size - tensor.storage_offset()
        held = (ctypes.c_char * (count * size)).from_address(tensor.data_ptr())
        number = np.uint16 if kind == torch.bfloat16 else torch.empty(0, dtype=kind).numpy().dtype
        return cls(np.frombuffer(held, number), kind == torch.bfloat16)

    @classmethod
    def at(cls, address: int, kind: str) -> Pointer:
        """To a tensor of which nobody says how large it is."""
        number = np.dtype(np.uint16 if kind == ROUNDED else kind)
        held = (ctypes.c_char * (UNKNOWN * number.itemsize)).from_address(address)
        return cls(np.frombuffer(held, number), kind == ROUNDED)

    @property
    def dtype(self) -> Pointer:
        """Triton has types of pointers; this one knows what it points to."""
        return self

    @property
    def element_ty(self) -> str:
        return ROUNDED if self.rounded else self.memory.dtype.name

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.rounded, self.place + plain(places))

    def __getitem__(self, axes: Any) -> Pointer:
        return Pointer(self.memory, self.rounded, np.asarray(self.place)[axes])

    def read(self, places: NDArray[np.int64]) -> NDArray[Any]:
        assert places.size == 0 or places.min() >= 0, "in front of the tensor"
        found = self.memory[places]
        return (found.astype(np.uint32) << 16).view(np.float32) if self.rounded else found

    def write(self, places: NDArray[np.int64], values: NDArray[Any]) -> None:
        if self.rounded:
            values = (rounded(values).view(np.uint32) >> 16).astype(np.uint16)
        assert places.size == 0 or places.min() >= 0, "in front of the tensor"
        self.memory[places] = values


class Language:
    """What both languages have; layouts mean nothing here."""

    int32, int64, uint64, float32, bfloat16 = "int32", "int64", "uint64", "float32", ROUNDED
    program, programs = (0, 0, 0), (1, 1, 1)
    polls = 0

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *given, **named: None
        raise AttributeError(f"no {name} on numpy")

    constexpr = staticmethod(lambda value: value)
    static_range = staticmethod(range)
    debug_barrier = barrier = staticmethod(lambda: None)
    inline_asm_elementwise = staticmethod(lambda *given, **named: None)
    cdiv = staticmethod(lambda a, b: -(-a // b))
    trans = staticmethod(lambda x: Block(np.swapaxes(x.values, -1, -2), x.dtype))
    permute = staticmethod(lambda x, order: x.permute(order))
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    split = staticmethod(lambda x: x.split())
    expand_dims = staticmethod(lambda x, axis: Block(np.expand_dims(x.values, axis)))
    convert_layout = staticmethod(lambda x, layout: x)
    minimum = staticmethod(lambda a, b: Block(np.minimum(plain(a), plain(b))))
    maximum = staticmethod(lambda a, b: Block(np.maximum(plain(a), plain(b))))
    where = staticmethod(lambda which, a, b: Block(np.where(plain(which), plain(a), plain(b))))
    exp, exp2, log, sqrt = (
        staticmethod(lambda x, f=f: Block(f(x.values))) for f in (np.exp, np.exp2, np.log, np.sqrt)
    )
    cast = staticmethod(lambda x, kind: Block(plain(x)).to(kind))
    multiple_of = staticmethod(lambda x, number: x)
    pointer_type = staticmethod(lambda kind: PointerType(kind))
    rsqrt = staticmethod(lambda x: Block(1 / np.sqrt(plain(x))))
    sum = staticmethod(lambda x, axis=None: Block(x.values.sum(axis)))
    max = staticmethod(lambda x, axis=None: Block(x.values.max(axis)))
    min = staticmethod(lambda x, axis=None: Block(x.values.min(axis)))
    cumsum = staticmethod(lambda x, axis: Block(np.cumsum(x.values, axis)))
    full = staticmethod(lambda shape, value, kind, layout=None: Block(np.full(shape, value, KINDS[kind])))
    zeros = staticmethod(lambda shape, dtype, layout=None: Block(np.zeros(shape, KINDS[dtype])))
    full_like = staticmethod(lambda x, value: Block(np.full_like(x.values, value)))
    zeros_like = staticmethod(lambda x: Block(np.zeros_like(x.values)))

    def arange(self, start: int, end: int, layout: Any = None) -> Block:
        assert (end - start).bit_count() == 1, "Triton's tensors are powers of two"
        return Block(np.arange(start, end))

    def program_id(self, axis: int) -> Block:
        return Block(self.program[axis])

    def num_programs(self, axis: int) -> Block:
        return Block(self.programs[axis])

    def range(self, *limits: Any, num_stages: int = 1) -> range:
        return range(*limits)

    def dot(self, a: Block, b: Block, acc: Block | None = None) -> Block:
        assert a.dtype == b.dtype, "as Triton asks for"
        product = a.values.astype(np.float32) @ b.values.astype(np.float32)
        return Block(product if acc is None else product + acc.values)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0.0, cache_modifier: str = "") -> Block:
        places, kind = np.asarray(pointer.place), ROUNDED if pointer.rounded else None
        if mask is None:
            return Block(pointer.read(places), kind)
        places, wanted = np.broadcast_arrays(places, plain(mask))
        return Block(np.where(wanted, pointer.read(np.where(wanted, places, 0)), plain(other)), kind)

    def store(self, pointer: Pointer, values: Any, mask: Any = True) -> None:
        given = np.broadcast_arrays(np.asarray(pointer.place), plain(values), plain(mask))
        places, values, wanted = map(np.atleast_1d, given)
        pointer.write(places[wanted], values[wanted])

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> Block:
        self.polls = self.polls + 1 if value == 0 else 0
        if self.polls > MOST_POLLS:
            raise RuntimeError(f"program {self.program} waits for what no earlier one has done")
        found = pointer.memory[pointer.place].copy()
        pointer.memory[pointer.place] += value
        return Block(found)

    def allocate_shared_memory(self, kind: str, shape: list[int], layout: Any) -> Block:
        return Block(np.full(shape, np.nan, np.float32), kind)

    # Gluon's for Hopper

    def async_copy_global_to_shared(self, target: Block, source: Pointer, mask: Any) -> None:
        target.values[...] = self.load(source, mask).values

    def warpgroup_mma(self, a: Block, b: Block, acc: Block, is_async: bool) -> Block:
        return self.dot(a, b, acc)

    def warpgroup_mma_wait(self, pending: int, deps: list[Block]) -> Block:
        return deps[0]


LANGUAGE = Language()


class Kernel:
    """What `jit` makes of a function: called by another one it is that function, launched it runs for a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        kinds = function.__annotations__
        self.numbers = {name for name in names if not str(kinds.get(name, "")).endswith("constexpr")}
        self.names = names

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            values = dict(zip(self.names, given, strict=False)) | named
            assert len(given) <= len(self.names)
            assert values.keys() - OPTIONS == set(self.names), "as Triton asks for"
            values = {name: self._argument(name, values[name]) for name in self.names}
            LANGUAGE.programs = (*grid, 1, 1)[:3]
            places = list(itertools.product(*map(range, reversed(LANGUAGE.programs))))
            if not values.get(WAITS):
                random.Random(len(places)).shuffle(places)
            for place in places:
                LANGUAGE.program = place[::-1]
                with np.errstate(all="ignore"):
                    self.function(**values)

        return launch

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Pointer.to(value)
        return Block(value) if name in self.numbers and isinstance(value, int) else value


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The decorator, which may be called with options first."""
    return Kernel if function is None else Kernel(function)


def modules() -> dict[str, ModuleType]:
    """That kernels import."""

    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(content)
        return made

    def nothing(*given: Any, **named: Any) -> None: ...

    copies = module(
        "async_copy",
        async_copy_global_to_shared=LANGUAGE.async_copy_global_to_shared,
        mbarrier_arrive=nothing,
    )
    barriers = module("mbarrier", MBarrierLayout=nothing, init=nothing, wait=nothing)
    hopper = module(
        "hopper",
        async_copy=copies,
        mbarrier=barriers,
        fence_async_shared=nothing,
        mma_v2=LANGUAGE.dot,
        warpgroup_mma=LANGUAGE.warpgroup_mma,
        warpgroup_mma_wait=LANGUAGE.warpgroup_mma_wait,
    )
    gluon = module("triton.experimental.gluon", jit=jit, language=LANGUAGE)
    return {
        "triton": module(
            "triton",
            jit=jit,
            language=LANGUAGE,
            cdiv=LANGUAGE.cdiv,
            next_power_of_2=lambda number: 1 << (number - 1).bit_length(),
        ),
        "triton.language": LANGUAGE,  # type: ignore[dict-item]
        "triton.language.extra": module("triton.language.extra"),
        "triton.language.extra.cuda": module("cuda", gdc_launch_dependents=nothing, gdc_wait=nothing),
        "triton.experimental": module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": LANGUAGE,  # type: ignore[dict-item]
        "triton.experimental.gluon.language.nvidia": module("nvidia"),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }


@contextmanager
def kernels_on_numpy(unless: bool) -> Iterator[None]:
    """What is imported inside has its kernels on numpy; others go on to see what they saw."""
    if unless:
        yield
        return
    hidden = _take_out()
    sys.modules.update(modules())
    try:
        yield
    finally:
        _take_out()
        for name, module in hidden.items():
            sys.modules[name] = module
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], own, module)


def _take_out() -> dict[str, ModuleType]:
    """All that depends on Triton."""
    ours = ("triton", "jigsawrl.engine.cuda", "jigsawrl.trainer.cuda")
    found = [
        name for name in sys.modules if any(name == each or name.startswith(f"{each}.") for each in ours)
    ]
    return {name: sys.modules.pop(name) for name in sorted(found)}
