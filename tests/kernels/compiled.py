"""What kernels were compiled to, by a key of all that decides it: a test need not compile again what is unchanged.

`compiled.jsonl` has a line for each kernel of Triton that the tests compile. Its key is Triton's own: the source, all
that it calls, types, constants, options, the target, Triton with its ptxas, and its switches. Registers, spills, shared
memory, products and a hash of the code are kept.

It also has a line for each kernel in CUDA C++ or HIP. Its `source` is a hash of the text, of our headers that it
includes, definitions and architecture, and its `compiler` has versions. Registers, stack and counts of mnemonics are
kept, of HIP all numbers that the assembly says. Lines of HIP stay where no clang is here, as long as they fit.

A test checks what is kept where the key is the same, and compiles otherwise; -m thorough compiles all and compares.

    python -m tests.kernels.compiled            # compile what changed, and store it
    python -m tests.kernels.compiled --first    # reports of Triton's kernels that the tests want, and which were kept
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ridgeline.kernels.base.aot import Report, cache_key, compile_some, kernels, tasks_of
from ridgeline.kernels.cuda import compile as by_compilers
from ridgeline.kernels.cuda.compile import HEADERS, MachineCode, compilers, cubin, machine_code
from ridgeline.kernels.gemm.ladder import hip
from ridgeline.kernels.gemm.ladder.endings import ENDINGS
from ridgeline.kernels.gemm.ladder.other_gpus import AMD_RUNGS, FP4, PAIRS
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, VARIANTS
from ridgeline.kernels.memory_bound.run import codes
from ridgeline.kernels.micro.run import codes as micro_codes
from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.cuda.cases import LLAMA_1B, QWEN3_06B
from ridgeline.kernels.step.persistent.cuda.run import ARCH, SOURCE, LaunchPlan

STORE = Path(__file__).with_name("compiled.jsonl")
PACKAGES = ("cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl", "triton")
LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)(.*);")


@dataclass(frozen=True)
class CodeFacts:
    """Registers and bytes of stack of a thread, and how often each mnemonic occurs. One that ends a group of wgmma has
    " gsb0" behind it."""

    registers: int
    stack: int
    counts: Mapping[str, int]

    @staticmethod
    def of(code: MachineCode) -> CodeFacts:
        found = filter(None, map(LINE.match, code.listing.splitlines()))
        names = (each[1] + (" gsb0" if "gsb0" in each[2] else "") for each in found)
        return CodeFacts(code.registers, code.stack, dict(sorted(Counter(names).items())))

    def number(self, mnemonic: str) -> int:
        """How many instructions begin so."""
        return sum(count for name, count in self.counts.items() if f"{name} ".startswith(mnemonic))

    def has(self, mnemonic: str) -> bool:
        return self.number(mnemonic) > 0


@cache
def stored() -> dict[str, dict[str, Any]]:
    """Key or source → line."""
    lines = map(json.loads, STORE.read_text().splitlines()) if STORE.exists() else ()
    return {line.get("source") or line["key"]: line for line in lines}


@dataclass(frozen=True)
class AmdFacts:
    """The numbers that an assembly says of its kernel, such as vgpr_count, and how often each mnemonic occurs."""

    numbers: Mapping[str, int]
    counts: Mapping[str, int]

    @staticmethod
    def of(assembly: str) -> AmdFacts:
        numbers = {
            name: int(value) for name, value in re.findall(r"\.(\w+_(?:count|size)): +(\d+)$", assembly, re.MULTILINE)
        }
        counts = Counter(re.findall(r"^\t([a-z]\w+)", assembly, re.MULTILINE))
        return AmdFacts(dict(sorted(numbers.items())), dict(sorted(counts.items())))

    @property
    def spills(self) -> int:
        """Registers and bytes of a lane's own memory that do not fit the registers."""
        return (
            sum(self.numbers[f"{name}_spill_count"] for name in ("sgpr", "vgpr"))
            + self.numbers["private_segment_fixed_size"]
        )

    def number(self, *mnemonics: str) -> int:
        """How many instructions are one of these."""
        return sum(self.counts.get(name, 0) for name in mnemonics)


def source_of(text: str, arch: str, defines: Mapping[str, str]) -> str:
    """Return a hash of a file in CUDA C++ or HIP, the headers of ours that it includes, and how it is compiled."""
    by = hip if arch.startswith("gfx") else by_compilers
    texts, todo = {"options": Path(by.__file__).read_text()}, [text]
    while todo:
        for name in re.findall(r'^#include "(.+?)"', todo.pop(), re.MULTILINE):
            if name not in texts:
                texts[name] = (HEADERS / name).read_text()
                todo.append(texts[name])
    kept = [text, sorted(texts.items()), arch, sorted(defines.items())]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


@cache
def compiler_here() -> str:
    """Return the versions of what compiles and disassembles ("": nothing is here)."""
    here = compilers()
    if here[:1] == ["nvcc"]:
        return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    known = {each.name for each in metadata.distributions()} if here else set[str]()
    return " ".join(f"{name} {metadata.version(name)}" for name in PACKAGES if name in known)


@cache
def clang_here() -> str:
    """Return the version of the clang that compiles HIP ("": none is here)."""
    told = hip.clang() and subprocess.run([hip.clang(), "--version"], capture_output=True, text=True, check=True).stdout
    return told.partition("\n")[0]


def facts(source: Path, arch: str, defines: Mapping[str, str]) -> CodeFacts:
    """Return what is kept of a file in CUDA C++, if it and the compiler are unchanged, or compile it."""
    line = stored().get(source_of(source.read_text(), arch, defines), {})
    if line.get("compiler") != compiler_here():
        return compiled(source, arch, defines)
    return CodeFacts(line["registers"], line["stack"], line["counts"])


def amd_facts(text: str, arch: str, defines: Mapping[str, str]) -> AmdFacts:
    """Return what is kept of a file in HIP, if it and the compiler are unchanged, or compile it."""
    line = stored().get(source_of(text, arch, defines), {})
    if line.get("compiler") != clang_here():
        return AmdFacts.of(hip.compile_hip(text, arch, defines))
    return AmdFacts(line["numbers"], line["counts"])


def compiled(source: Path, arch: str, defines: Mapping[str, str]) -> CodeFacts:
    """Compile a file in CUDA C++."""
    return CodeFacts.of(machine_code(cubin(source, arch, defines)))


def costly(source: Path, arch: str, defines: Mapping[str, str]) -> bool:
    """Return True if a file is unchanged, but must be compiled since the compiler is another."""
    line = stored().get(source_of(source.read_text(), arch, defines))
    return line is not None and line["compiler"] != compiler_here()


def known(text: str, arch: str, defines: Mapping[str, str]) -> bool:
    """Return True if a file is unchanged: a test of more than what is kept then waits for a thorough run."""
    return source_of(text, arch, defines) in stored()


def reports(tasks: list[tuple[int, str]], processes: int) -> Iterator[tuple[str, Report]]:
    """Yield the keys of Triton's kernels and what they compile to; only those that are not stored are compiled."""
    keys = {task: cache_key(kernels()[task[0]], task[1]) for task in tasks}
    claims = {"kernel", "arch", "hot", "tensor_cores", "may_wait"}  # an entry's own, which no key knows
    names = {each.name for each in fields(Report)} - {"seconds", *claims}
    kept = {key: line for key in keys.values() if names <= (line := stored().get(key, {})).keys()}
    for (at, arch), key in keys.items():
        if key in kept:
            found, wanted = {name: kept[key][name] for name in names}, kernels()[at].options
            found |= {"hot": wanted.hot, "tensor_cores": wanted.tensor_cores, "may_wait": wanted.waits}
            yield key, Report(kernels()[at].name, arch, 0.0, **found)
    missing = [task for task, key in keys.items() if key not in kept]
    yield from zip((keys[task] for task in missing), compile_some(missing, processes), strict=True)


def cuda_kernels() -> Iterator[tuple[str, Path, str, Mapping[str, str]]]:
    """Yield the name, file, architecture and definitions of each kernel in CUDA C++ that is kept."""
    for rung in (*RUNGS, *(each.product for each in VARIANTS), *(each.rung for each in ENDINGS), PAIRS, FP4):
        yield rung.name, rung.source, rung.arch, rung.defines
    for variant in VARIANTS:
        yield variant.ceiling.name, variant.ceiling.source, "sm_90", variant.defines
    for code in codes():
        yield code.name, code.source, "sm_90", code.defines
    yield from persistent_steps()
    for code in micro_codes():
        yield f"micro-{code.source.stem}", code.source, code.arch, code.defines


def persistent_steps() -> Iterator[tuple[str, Path, str, Mapping[str, str]]]:
    """Yield the persistent step of two models with one row and with eight."""
    for model, shape in {"llama-1b": LLAMA_1B, "qwen3-0.6b": QWEN3_06B}.items():
        for rows in (1, 8):
            schedule = build(replace(shape, layers=1), rows, 132, 4, marked=True)
            plan = LaunchPlan.of(shape, rows, 16, schedule, 4)
            yield f"persistent-{model}-{rows}", SOURCE, ARCH, plan.defines


def hip_kernels() -> Iterator[tuple[str, str, str, Mapping[str, str]]]:
    """Yield the name, text, architecture and definitions of each kernel in HIP that is kept."""
    for rung in hip.hip_rungs():
        for arch in hip.ARCHS:
            yield rung.name, hip.in_hip(rung), arch, {}
    for each in AMD_RUNGS:
        yield each.rung.name, each.rung.source.read_text(), each.rung.arch, each.rung.defines


def store(processes: int) -> None:
    lines = []
    for key, report in reports(tasks_of(first=True), processes):
        if report.error:
            raise SystemExit(f"{report.kernel} does not compile for {report.arch}: {report.error}")
        kept = {name: value for name, value in asdict(report).items() if name != "seconds"}
        lines.append({"kind": "triton", "key": key, **kept})
    for name, source, arch, defines in cuda_kernels():
        about = {"kind": "cuda", "name": name, "arch": arch, "source": source_of(source.read_text(), arch, defines)}
        lines.append({**about, "compiler": compiler_here(), **asdict(facts(source, arch, defines))})
    for name, text, arch, defines in hip_kernels():
        about = {"kind": "hip", "name": name, "arch": arch, "source": source_of(text, arch, defines)}
        if clang_here():
            lines.append({**about, "compiler": clang_here(), **asdict(amd_facts(text, arch, defines))})
        elif kept := stored().get(about["source"]):
            lines.append(kept)
        else:
            print(f"{name} for {arch} changed, and there is no clang to keep what it compiles to")
    lines.sort(key=lambda line: (line["kind"], line.get("name") or line["kernel"], line["arch"]))
    STORE.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(f"stored {len(lines)} lines in {STORE}")


if __name__ == "__main__":
    many = len(os.sched_getaffinity(0))
    if "--first" in sys.argv:
        for key, found in reports(tasks_of(first=True), many):
            print(json.dumps(asdict(found) | {"kept": key in stored()}), flush=True)
    else:
        store(many)
