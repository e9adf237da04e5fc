"""Compile Triton kernels ahead of time, without a GPU, and report what the machine code uses.

A module with kernels lists what is worth compiling in a module-level `AOT`, next to the device code:

    AOT = (
        AotKernel(_kernel, {"x_ptr": "*bf16", "n": "i32:16", "eps": "fp32"}, {"BLOCK": 1024}, num_warps=8, hot=True),
    )

* `signature`: every argument that is not constexpr, in order. Pointers are taken as divisible by 16, as torch's
  allocations are, unless the kernel does not specialize them. Integers are not, unless they say so ("i32:16").
* `constexprs`: all constexpr arguments but `PDL`, which is switched on, with its launch option, where the architecture
  has it. An argument that is None at run time is a constexpr of value None; one that is always 1 is a constexpr of
  value 1.
* `registers`: a limit for each thread, as a launch has it with `maxnreg`.
* `hot`: the kernel must not spill registers.
* `tensor_cores`: a part of the name of an instruction that the kernel must use on sm_90: "HGMMA" (products of a
  warpgroup) or "MMA" (also products of a warp). On other architectures the kernel must then use any of their
  instructions.
* `waits`: why the kernel may wait for other programs, as no other may: "ranks" for those of other devices, "together"
  for those of its own launch, which is cooperative, "bounded" if it asks so often at most, and waits for the end of the
  launch in front of it then.
* `archs`: the architectures to compile for; by default all of `ARCHS`.

A plain tuple (kernel, signature, constexprs) will do where no option is needed. Gluon kernels are welcome too; give
them the architectures that they are for.

`kernels()` finds the lists by importing every module of an op's folder, so nothing has to be registered. Keep them
short: one entry per code path that differs, at the shapes of a real model, the most common one first. The tests compile
the first entry of each kernel for sm_90 and one kernel of each op for the other architectures, and all on request.

    python -m ridgeline.kernels.base.aot --arch sm_90 --match rope

prints one line per kernel, and with --first only of what the tests compile. Run it without TRITON_INTERPRET: an
interpreted kernel cannot be compiled. With --json each line has a hash of the machine code, so that two trees can be
compared: a change of host code must leave all of them equal.

`compiling_for` is the other way, without lists. Inside it launches compile for a GPU that need not be there, and run
nothing. So a model that is called with tensors of the meta device fills Triton's cache (`ridgeline compile`). Triton
finds a compiled kernel by a hash of its source, argument types, constants, options, target and Triton itself. A process
with the same of all of these finds what was compiled ahead, if the cache still lies at the path where it was filled
(its index files hold full paths).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.kernels.base.faults import one_by_one, reused_barriers
from ridgeline.kernels.base.waits import waits

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
MAIN_ARCH = "sm_90"  # for which kernels are measured and must not spill
ONE_OF_EACH = ("sm_90", "gfx942")  # for kernels that differ little between a vendor's architectures
TENSOR_CORE_INSTRUCTIONS = re.compile(r"\b(HGMMA|QGMMA|IGMMA|HMMA|IMMA|QMMA|OMMA|UTCHMMA|UTCQMMA|v_mfma_\w+)")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one compilation; see the module's text."""

    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None
    hot: bool = False
    tensor_cores: str = ""
    waits: str = ""
    archs: tuple[str, ...] = ARCHS


class AotKernel:
    """A kernel with the types and constants of one compilation; see the module's text."""

    def __init__(self, fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any) -> None:
        self.fn = fn
        self.signature = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        self.constexprs = dict(constexprs)
        self.options = Options(**options)

    @property
    def name(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.constexprs.items() if v is not None)
        boxes = {t.removeprefix("tensordesc<").partition("[")[0] for t in self.signature.values() if "tensordesc" in t}
        types = ",".join(sorted(boxes | {t[1:] for t in self.signature.values() if t.startswith("*")}))
        return f"{self.fn.__name__.lstrip('_')}[{types};{shown};warps={self.options.num_warps}]"


@dataclass(frozen=True)
class Report:
    """The result of one compilation.

    registers: per thread.
    spilled: bytes of stack per thread (AMD: vector registers).
    shared: bytes of shared memory of a program.
    instructions: how often each tensor-core instruction occurs. On NVIDIA they are counted only where some are
        expected.
    code: a hash of the assembly (PTX on NVIDIA), whatever the kernel and its file are called.
    waits: the instructions by which it waits for other programs (waits.py), looked for on sm_90 alone.
    may_wait: why it may.
    """

    kernel: str
    arch: str
    seconds: float
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    hot: bool = False
    tensor_cores: str = ""
    instructions: dict[str, int] = field(default_factory=dict)
    code: str = ""
    error: str = ""
    waits: tuple[str, ...] = ()
    may_wait: str = ""


@cache
def kernels() -> list[AotKernel]:
    """Return all entries of all `AOT` lists under ridgeline.kernels."""
    import ridgeline.kernels as package

    modules = (
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if info.name != __name__
    )
    entries = [entry for module in modules for entry in getattr(module, "AOT", ())]
    return [AotKernel(*entry) if isinstance(entry, tuple) else entry for entry in entries]


def build(kernel: AotKernel, arch: str) -> Any:
    """Return Triton's compiled kernel for an architecture such as "sm_90" or "gfx942"."""
    import triton

    source, options = _source(kernel, arch)
    return triton.compile(source, target=_target(arch), options=options)


def cache_key(kernel: AotKernel, arch: str) -> str:
    """Return a hash of all that decides what Triton compiles: its own key, without compiling."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    source, options = _source(kernel, arch)
    backend = make_backend(_target(arch))
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def _source(kernel: AotKernel, arch: str) -> tuple[Any, dict[str, Any]]:
    """Return the source for Triton, and its options."""
    from triton.compiler import ASTSource

    nvidia, target = arch.startswith("sm_"), _target(arch)
    constexprs, options = dict(kernel.constexprs), {"num_warps": kernel.options.num_warps}
    options["num_stages"] = kernel.options.num_stages if nvidia else min(2, kernel.options.num_stages)
    if nvidia and kernel.options.registers is not None:
        options["maxnreg"] = kernel.options.registers
    names = kernel.fn.arg_names
    if "PDL" in names:
        constexprs["PDL"] = nvidia and target.arch >= 90
        if constexprs["PDL"]:
            options["launch_pdl"] = True
    missing = [name for name in names if name not in kernel.signature and name not in constexprs]
    unknown = [name for name in (*kernel.signature, *constexprs) if name not in names]
    if missing or unknown:
        raise ValueError(f"{kernel.name}: arguments without a type: {missing}; types without an argument: {unknown}")
    types = {name: kernel.signature.get(name, "constexpr").partition(":")[0] for name in names}
    unspecialized = {p.name for p in kernel.fn.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    divisible = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in kernel.signature.items()
        if (kind.startswith("*") or kind.endswith(":16")) and name not in unspecialized
    }
    constants = {(names.index(name),): value for name, value in constexprs.items()}
    source_of: Any = ASTSource
    if kernel.fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_of = GluonASTSource
    return source_of(fn=kernel.fn, signature=types, constexprs=constants, attrs=divisible), options


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


# Bytes of shared memory that a program may have, from the vendors' tables
SHARED_MEMORY = dict.fromkeys(("sm_80", "sm_87"), 166_912)
SHARED_MEMORY |= dict.fromkeys(("sm_86", "sm_89", "sm_120"), 101_376)
SHARED_MEMORY |= dict.fromkeys(("sm_90", "sm_100", "sm_103"), 232_448)


class _AbsentDriver:
    """A driver for a GPU that is not there. It answers what Triton asks before it runs anything."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiled:
    """The cache keys of kernels that were compiled, and of kernels that the cache already had; the names of all of
    them. seconds: that compiling took, with the modules that launch them.
    """

    fresh: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def __or__(self, other: Compiled) -> Compiled:
        """Return the union. A kernel that one process compiled and the other then found counts as compiled."""
        fresh, seconds = self.fresh | other.fresh, self.seconds + other.seconds
        return Compiled(fresh, (self.found | other.found) - fresh, self.names | other.names, seconds)


@contextmanager
def compiling_for(
    arch: str, multiprocessors: int, wanted: Callable[[str], bool] = lambda kernel: True
) -> Iterator[Compiled]:
    """Compile for `arch` inside: launching a kernel compiles it and leaves it in Triton's cache. This is for processes
    that do nothing else: kernels that were launched before, or are launched after, are bound to another driver.

    wanted: is called once for every kernel, with a text that names the kernel in any process. Kernels for which it
        returns False are not compiled.

    With a kernel comes the module that launches it (launchers.py).
    """
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from ridgeline.kernels.base import launch
    from ridgeline.kernels.base.launchers import Launchers

    launchers = Launchers() if arch.startswith("sm_") else None
    if launchers is not None and wanted("launchers"):
        launchers.prepare_calls()
    done, run, launched = Compiled(), JITFunction.run, set[Any]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launch = _launch_of(self, args, kwargs)
        if launch in launched:  # Triton itself would look through all arguments of a kernel that it may not compile
            return None
        launched.add(launch)
        began, known = time.perf_counter(), len(done.fresh)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if len(done.fresh) > known:
            done.seconds += time.perf_counter() - began
        return kernel

    skipped = set[str]()

    def skip(*, key: str, fn: Any, **_: Any) -> bool:
        kernel = f"{fn.module}.{fn.name}{key}"
        if kernel not in skipped and not wanted(kernel):
            skipped.add(kernel)
        return kernel in skipped

    def note(*, src: Any, metadata: Mapping[str, Any], cache_hit: bool, **_: Any) -> None:
        (done.found if cache_hit else done.fresh).add(metadata["hash"])
        done.names.add(src.name)
        if launchers is not None:
            launchers.prepare(src, metadata)

    capability = divmod(int(arch[3:]), 10) if arch.startswith("sm_") else (0, 0)
    told = {
        "compute_capability": lambda device: capability,
        "num_multiprocessors": lambda device: multiprocessors,
        "shared_memory": lambda device: SHARED_MEMORY.get(arch, 65_536),
    }
    asked = {name: getattr(launch, name) for name in told}
    JITFunction.run, triton.knobs.compilation.listener = compile_only, note
    triton.knobs.runtime.jit_cache_hook = skip
    _replace(asked, told)
    driver.set_active(_AbsentDriver(_target(arch)))
    try:
        yield done
    finally:
        JITFunction.run, triton.knobs.compilation.listener = run, None
        triton.knobs.runtime.jit_cache_hook = None
        _replace(told, asked)
        driver._active = None


def _launch_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key, another one for launches that are compiled apart. Some that are compiled alike have others too."""
    given = zip((parameter.is_constexpr for parameter in function.params), args, strict=False)
    positional = tuple(_kind_of(value, constant) for constant, value in given)
    constant = {parameter.name: parameter.is_constexpr for parameter in function.params}
    named = tuple((name, _kind_of(value, constant.get(name, True))) for name, value in sorted(kwargs.items()))
    return function.fn, positional, named


def _kind_of(value: Any, constant: bool) -> Any:
    """Return the part of an argument that Triton may compile a kernel for."""
    if not constant and type(value) is int:
        return int, value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31, value < 1 << 63
    if not constant and type(value) is float:
        return float
    if type(value).__name__ in ("Tensor", "Parameter"):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int | float | str | None):
        return type(value), value
    return object()  # unlike any other


def _replace(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Replace these functions in every kernel module that has imported them. Modules that are imported later take them
    from the first module."""
    for module in [module for name, module in sys.modules.items() if name.startswith("ridgeline.kernels.")]:
        for name in new:
            if getattr(module, name, None) is old[name]:
                setattr(module, name, new[name])


def report(kernel: AotKernel, arch: str) -> Report:
    """Compile and disassemble a kernel. A failure becomes the report's `error`."""
    started, options = time.perf_counter(), kernel.options
    try:
        compiled = build(kernel, arch)
    except Exception as error:
        seconds = time.perf_counter() - started
        return Report(kernel.name, arch, seconds, error=f"{type(error).__name__}: {error}"[:2000])
    if arch.startswith("sm_"):
        registers, spilled, listing = nvidia_code(compiled.asm["cubin"], bool(options.tensor_cores))
    else:
        listing = compiled.asm["amdgcn"]
        registers = int(_first(r"\.vgpr_count:\s+(\d+)", listing))
        spilled = int(_first(r"\.vgpr_spill_count:\s+(\d+)", listing))
    counts: dict[str, int] = {}
    for name in TENSOR_CORE_INSTRUCTIONS.findall(listing):
        counts[name] = counts.get(name, 0) + 1
    found: tuple[str, ...] = ()
    fault = ""
    if arch == MAIN_ARCH:
        found, fault = tuple(waits(compiled.asm["ptx"])), _fault(compiled.asm["ptx"], listing)
    return Report(
        kernel.name, arch, time.perf_counter() - started, registers, spilled,
        compiled.metadata.shared, options.hot, options.tensor_cores, counts, _hash(compiled), fault, found,
        options.waits,
    )  # fmt: skip


def _fault(ptx: str, sass: str) -> str:
    """Return the first fault that is found (faults.py) in a sentence, "" if there is none."""
    if reused := reused_barriers(ptx):
        return f"numbers lie in the place of a barrier: {reused[0]}. Make no barrier that nothing uses."
    if one_by_one(sass):
        return "the products of warpgroups run one by one: ptxas -v has the reason. Put no branch before them."
    return ""


def _hash(compiled: Any) -> str:
    text = compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"]
    return hashlib.sha256(text.replace(compiled.metadata.name, "kernel").encode()).hexdigest()


def nvidia_code(cubin: bytes, disassemble: bool) -> tuple[int, int, str]:
    """Return (registers, bytes of stack per thread, disassembly if wanted), by the tools in Triton's own package."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(tool: str, option: str) -> str:
            return subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout

        usage = run("cuobjdump", "-res-usage")
        listing = run("nvdisasm", "-c") if disassemble else ""
    return int(_first(r"REG:(\d+)", usage)), int(_first(r"STACK:(\d+)", usage)), listing


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the compiler's output")
    return found[1]


def _compile_one(task: tuple[int, str]) -> Report:
    import triton

    triton.knobs.compilation.disable_line_info = True  # assembly would name the lines of the source
    index, arch = task
    return report(kernels()[index], arch)


def tasks_of(archs: tuple[str, ...] = ARCHS, match: str = "", first: bool = False) -> list[tuple[int, str]]:
    """Return the places of the kernels whose name contains `match`, with every one of `archs` that they are meant for.

    first: only the first entry of every kernel for `MAIN_ARCH`, and for each other architecture one kernel of every op,
        with matrix products if the op has any.
    """
    tasks = [
        (at, arch)
        for at, kernel in enumerate(kernels())
        if match in kernel.name
        for arch in archs
        if arch in kernel.options.archs
    ]
    return _first_of(tasks) if first else tasks


def _first_of(tasks: list[tuple[int, str]]) -> list[tuple[int, str]]:
    chosen: dict[Any, tuple[int, str]] = {}
    for at, arch in sorted(
        tasks, key=lambda task: task[1] != MAIN_ARCH and not kernels()[task[0]].options.tensor_cores
    ):
        function = kernels()[at].fn.fn
        kind = function if arch == MAIN_ARCH else function.__module__.rpartition(".")[0]
        chosen.setdefault((kind, arch), (at, arch))
    return sorted(chosen.values())


def compile_all(
    archs: tuple[str, ...] = ARCHS, match: str = "", processes: int = 2, first: bool = False
) -> Iterator[Report]:
    """Compile the kernels that `tasks_of` names."""
    yield from compile_some(tasks_of(archs, match, first), processes)


def compile_some(tasks: list[tuple[int, str]], processes: int) -> Iterator[Report]:
    """Compile these kernels, each for its architecture, and yield their reports in this order."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(_compile_one, tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile Triton kernels without a GPU.")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="default: all")
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--first", action="store_true", help="only what the tests compile by default")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    archs = tuple(arguments.arch or ARCHS)
    for result in compile_all(archs, arguments.match, arguments.processes, arguments.first):
        if arguments.json:
            print(json.dumps(asdict(result)), flush=True)
            continue
        used = f"{result.registers} registers, {result.spilled} spilled, {result.shared} B shared"
        found = " ".join(f"{name} {count}" for name, count in result.instructions.items())
        print(f"{result.seconds:5.2f} s {result.arch:7s} {result.kernel}: {result.error or used} {found}", flush=True)


if __name__ == "__main__":
    main()
