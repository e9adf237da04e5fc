"""Run the text of a Gluon kernel in torch, on a machine without a GPU.

Layouts say where numbers lie and never what they are, so an executor that is blind to them computes what the kernel
means. It checks more than a GPU would say: that no load or store leaves its tensor, and that nothing is read from
shared memory before it has been asked for and awaited (memory holds NaN, and copies happen as late as they may). What
it cannot see are races between threads, and what the compiler makes of layouts.

Partitions and programs run as threads, since they wait for each other.
"""

from __future__ import annotations

import builtins
import itertools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.gemm.test_coded_asm import run as run_asm

TYPES = ("bfloat16", "float16", "float32", "uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn")


class Value(torch.Tensor):
    """A tensor of the kernel's."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    """An address into the memory of a tensor."""

    def __init__(self, memory: Tensor, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def checked(self, mask: Any) -> tuple[Tensor, Tensor]:
        at, kept = torch.broadcast_tensors(value(self.at), value(True if mask is None else mask))
        assert not kept.any() or (at[kept].min() >= 0 and at[kept].max() < self.memory.numel()), "outside of a tensor"
        return at, kept


class Shared:
    """Shared memory, which holds NaN (or noise) at first."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, layout: Any = None) -> Value:
        return value(self.data.clone())

    def store(self, x: Tensor) -> None:
        assert x.shape == self.data.shape
        self.data.copy_(x)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    def __init__(self, changed: threading.Condition) -> None:
        self.count, self.left, self.bytes, self.phase, self.changed = 0, 0, 0, 0, changed

    def update(self, arrivals: int, bytes: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += bytes
            assert self.left >= 0, "more arrivals than a barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase ^ 1
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != parity, timeout=60), "nobody arrives"


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Value:
    at, kept = pointer.checked(mask)
    return value(torch.where(kept, pointer.memory[torch.where(kept, at, 0).long()], other).to(pointer.memory.dtype))


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    at, kept = pointer.checked(mask)
    x, at, kept = torch.broadcast_tensors(value(x), at, kept)
    pointer.memory[at[kept].long()] = x[kept].to(pointer.memory.dtype).as_subclass(Tensor)


def product(a: Any, b: Any, c: Tensor) -> Value:
    a = a.data if isinstance(a, Shared) else a
    b = b.data if isinstance(b, Shared) else b
    assert a.dtype == b.dtype
    return value((a.double() @ b.double() + c.double()).float())


def inline_asm(text: str, constraints: str, args: Sequence[Tensor], dtype: torch.dtype, pure: bool, pack: int) -> Value:
    """Run assembly of two neighbours in a register."""
    assert pack == 2
    bits = [x.view(torch.int16) if x.dtype.is_floating_point else x for x in args]
    words = [x.long() & 0xFFFF for x in torch.broadcast_tensors(*bits)]
    found = run_asm(text, [(x[..., 0::2] | x[..., 1::2] << 16).as_subclass(Tensor) for x in words], dtype)
    return value(found.flatten(-2).to(dtype))


class Language:
    """The names of `gl` and `tl` for one program."""

    def __init__(self, index: tuple[int, ...], grid: tuple[int, ...], changed: threading.Condition) -> None:
        for name in TYPES:
            setattr(self, name, getattr(torch, name))
        self.index, self.grid, self.changed = index, grid, changed
        self.static_range, self.load, self.store = builtins.range, load, store
        self.inline_asm_elementwise = inline_asm
        self.sigmoid, self.rsqrt, self.erf = torch.sigmoid, torch.rsqrt, torch.erf
        self.exp, self.exp2 = torch.exp, torch.exp2
        self.expand_dims = lambda x, axis: value(x).unsqueeze(axis)
        self.split = lambda x: (x[..., 0], x[..., 1])
        self.broadcast = lambda a, b: tuple(torch.broadcast_tensors(a, b))
        self.sum = lambda x, axis: x.sum(axis)
        self.cdiv = lambda a, b: -(-a // b)
        self.convert_layout = lambda x, layout=None, assert_trivial=False: x
        self.static_assert = lambda condition: None

    def __getattr__(self, name: str) -> Any:
        """Return something for each kind of layout."""
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def program_id(self, axis: int) -> Value:
        return value(self.index[axis] if axis < len(self.index) else 0)

    def num_programs(self, axis: int) -> Value:
        return value(self.grid[axis] if axis < len(self.grid) else 1)

    def arange(self, start: int, end: int, layout: Any = None) -> Value:
        return value(torch.arange(start, end))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Value:
        return value(torch.zeros(shape, dtype=dtype))

    def full(self, shape: Sequence[int], fill: Any, dtype: torch.dtype, layout: Any = None) -> Value:
        return value(torch.full(shape, fill, dtype=dtype))

    def where(self, condition: Any, a: Any, b: Any) -> Value:
        return value(torch.where(value(condition), a, b))

    def minimum(self, a: Any, b: Any) -> Value:
        return torch.minimum(value(a), torch.as_tensor(b, dtype=value(a).dtype))

    def maximum(self, a: Any, b: Any) -> Value:
        return torch.maximum(value(a), torch.as_tensor(b, dtype=value(a).dtype))

    def atomic_add(self, pointer: Pointer, x: int, sem: str = "") -> Value:
        with self.changed:
            old = pointer.memory[int(pointer.at)].clone()
            pointer.memory[int(pointer.at)] += x
            self.changed.notify_all()
            if x == 0:
                self.changed.wait(0.01)  # a warp spins
        return value(old)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if dtype == torch.int64:
            found = Barriers([Barrier(self.changed) for _ in range(shape[0])])
            return found if len(shape) > 1 else found[0]
        fill = torch.nan if dtype.is_floating_point else -1
        return Shared(torch.full(shape, fill, dtype=dtype))

    def warp_specialize(self, partitions: Sequence[Any], warps: Any = None, registers: Any = None) -> None:
        together([lambda f=f, args=args: f(*args) for f, args in partitions])


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:
        return self[int(i)]


class AsyncCopy:
    """Copies of one thread's program, done when they are awaited."""

    def __init__(self) -> None:
        self.local = threading.local()

    def groups(self) -> list[list[Callable[[], None]]]:
        if not hasattr(self.local, "groups"):
            self.local.groups = [[]]
        return self.local.groups

    def load_rows(self, to: Shared, pointer: Pointer, mask: Any = None) -> None:
        found = load(pointer, mask)
        self.groups()[-1].append(lambda: to.data.copy_(found))

    def commit_group(self) -> None:
        self.groups().append([])

    def wait_group(self, pending: int) -> None:
        groups = self.groups()
        while len(groups) - 1 > pending:
            for copy in groups.pop(0):
                copy()


def load_tile(descriptor: Any, corner: Sequence[Any], barrier: Barrier, to: Shared) -> None:
    """Copy a box, with zeros outside of the tensor."""
    rows, columns = descriptor.block_shape
    r, c = int(corner[0]), int(corner[1])
    box = torch.zeros(rows, columns, dtype=descriptor.dtype)
    found = descriptor.x[r : r + rows, c : c + columns]
    box[: found.shape[0], : found.shape[1]] = found
    to.data.copy_(box)
    barrier.update(0, -box.nbytes)


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in threads, and raise what any of them raises."""
    problems: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class Names:
    """The globals of kernels' modules, with this file's names in place of Gluon's."""

    def __init__(self, language: Language) -> None:
        copies = AsyncCopy()
        mbarrier = SimpleNamespace(
            init=lambda b, count: (setattr(b, "count", count), setattr(b, "left", count)),
            expect=lambda b, bytes: (b.update(0, bytes), b.update(1, 0)),
            wait=lambda b, parity, pred=True: b.wait(int(parity)) if pred else None,
            arrive=lambda b, count=1, pred=True: b.update(count, 0) if pred else None,
            MBarrierLayout=lambda: None,
        )
        self.known: dict[int, dict[str, Any]] = {}
        self.fakes: dict[str, Any] = {
            "gl": language, "tl": language, "async_copy": copies, "load_rows": copies.load_rows, "mma_v2": product,
            "mbarrier": mbarrier, "barrier": lambda: None, "fence_async_shared": lambda: None, "load_tile": load_tile,
            "viewed": lambda tile, shape, layout: Shared(tile.data.view(*shape)),
            "warpgroup_mma": lambda a, b, c, use_acc=True, is_async=False: product(a, b, c if use_acc else c * 0),
            "range": lambda *ends: (value(i) for i in builtins.range(*map(int, ends))),
            "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else deps,
        }  # fmt: skip

    def function(self, kernel: Any) -> FunctionType:
        plain = kernel.fn
        return FunctionType(plain.__code__, self.of(plain.__globals__), plain.__name__, plain.__defaults__)

    def of(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self.known:
            self.known[id(names)] = found = names | {"range": self.fakes["range"]}
            for name, x in names.items():
                if name in self.fakes:
                    found[name] = self.fakes[name]
                elif hasattr(x, "fn") and hasattr(x, "__name__") and type(x).__module__.startswith("triton"):
                    constant = type(x).__name__ == "ConstexprFunction"
                    found[name] = x.fn if constant else self.function(x)
                elif type(x).__name__ == "constexpr":
                    found[name] = x.value
        return self.known[id(names)]


def launch(kernel: Any, programs: int | tuple[int, ...], **arguments: Any) -> None:
    """Run a kernel, as so many programs or a grid of them. Tensors become pointers, and numbers that are no constants
    tensors."""
    changed = threading.Condition()
    constants = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}

    def turned(name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            if not x.numel():
                return Pointer(x.flatten(), 0)
            size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
            return Pointer(x.as_strided((size,), (1,), x.storage_offset()), 0)
        return value(x) if isinstance(x, int | float) and name not in constants else x

    turned_arguments = {name: turned(name, x) for name, x in arguments.items()}

    grid = (programs,) if isinstance(programs, int) else programs

    def program(index: tuple[int, ...]) -> None:
        Names(Language(index, grid, changed)).function(kernel)(**turned_arguments)

    together([lambda index=index: program(index) for index in itertools.product(*map(builtins.range, grid))])
