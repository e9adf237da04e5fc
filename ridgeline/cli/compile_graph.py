"""`ridgeline compile-graph`: a function of tensors after each stage of the compiler, and its machine code."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.options import with_records
from ridgeline.core.errors import InvalidConfig

SHAPE = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\]")


@dataclass(frozen=True)
class GraphFlags:
    """Options of a compilation."""

    target: Annotated[str, typer.Option(help="cpu, sm_80, sm_90 or gfx942.")] = "cpu"
    rounding: Annotated[
        str, typer.Option(help="torch: 16-bit numbers are rounded after each op; float32: once a kernel.")
    ] = "torch"
    artifacts: Annotated[
        Path | None, typer.Option(help="Folder to fill with machine code of GPUs (default: the user's cache).")
    ] = None


@with_records
def compile_graph(
    function: Annotated[
        str,
        typer.Argument(help="module:function, or a file of torch.export.save (.pt2). Both can run code: trust them."),
    ],
    input: Annotated[
        list[str] | None, typer.Option(help='A tensor that it takes, such as "bfloat16[32, 4096]". Repeatable.')
    ] = None,
    print_after: Annotated[
        list[str] | None,
        typer.Option(help="Stages to print, or all: capture, canonicalize, fuse, mapping, llvm, PTX, GCN, assembly …"),
    ] = None,
    *,
    graph: GraphFlags,
) -> None:
    """Compile a function of tensors without running it, and print what each stage makes of it.

    No GPU is needed. A machine without MLIR finds the machine code in the folder: it is the option `artifacts` of
    `torch.compile(backend="ridgeline")`.
    """
    from ridgeline.compiler.artifacts import ArtifactStore, default_store
    from ridgeline.compiler.backend import CompilationStages, CompilerOptions
    from ridgeline.compiler.backend import compile_graph as compiled
    from ridgeline.compiler.targets import target_named

    wanted, stages = set(print_after or ()), CompilationStages()
    if graph.artifacts is not None:
        _writable(graph.artifacts)
    target = target_named(graph.target, ArtifactStore([graph.artifacts]) if graph.artifacts else default_store())
    module, device = _traced(function, input or (), target.device)
    began = time.perf_counter()
    program = compiled(module, stages, target, CompilerOptions(rounding=graph.rounding), device)
    seconds = time.perf_counter() - began

    def told(name: str, text: str) -> None:
        shown.append(name)
        if wanted & {name, "all"}:
            print(f"// after {name}\n{text}\n")

    shown: list[str] = []
    for name, text in stages.texts.items():
        told(name, text)
    fused = [node for node in program.graph.nodes if node.op == "fused"]
    for at, node in enumerate(fused if wanted else ()):
        if wanted & {"all"} or len(fused) > 1:
            print(f"// kernel {at}: {node.result.name}\n")
        target.explain(node, told)
    if unknown := wanted - {*shown, "all"}:
        raise InvalidConfig(f"there is no stage {sorted(unknown)[0]!r}; there are {', '.join(dict.fromkeys(shown))}.")
    calls = len(program.graph.nodes) - program.num_kernels
    print(f"kernels for {target.name}: {program.num_kernels}, calls of torch: {calls}, in {seconds:.2f} s")
    for why in program.fallbacks:
        print(f"a kernel is missing: {why}")
    if program.fallbacks:
        raise typer.Exit(1)


def _traced(function: str, inputs: Sequence[str], device: str) -> tuple[Any, str]:
    """Return the functional graph of a function of tensors, and the device on which they are."""
    from ridgeline.compiler.backend import decompositions

    if function.endswith(".pt2"):
        import torch

        if not Path(function).is_file():
            raise InvalidConfig(f"there is no file {function}.")
        try:
            exported = torch.export.load(function).run_decompositions(decompositions())
        except Exception as error:  # of many classes, whatever is wrong with the file
            raise InvalidConfig(f"{function} is no file of torch.export.save: {_first_line(error)}") from error
        return exported.graph_module, "cpu"
    return _traced_function(_found(function), [_type_of(each) for each in inputs], device), device


def _traced_function(function: Any, types: Sequence[tuple[Any, tuple[int, ...]]], device: str) -> Any:
    import torch
    from functorch.compile import aot_function, make_boxed_func
    from torch._subclasses import FakeTensorMode

    from ridgeline.compiler.backend import decompositions

    found: list[Any] = []

    def keep(graph: Any, _: object) -> Any:
        found.append(graph)
        return make_boxed_func(graph.forward)

    with FakeTensorMode():
        try:
            tensors = [torch.empty(sizes, dtype=dtype, device=device) for dtype, sizes in types]
            aot_function(function, fw_compiler=keep, decompositions=decompositions())(*tensors)
        except Exception as error:  # whatever the function raises
            raise InvalidConfig(f"the function does not take these tensors: {_first_line(error)}") from error
    return found[0]


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute or not module or module.startswith("."):
        raise InvalidConfig(f"say module:function in place of {name!r}.")
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"there is no {name}: {error}.") from error
    except Exception as error:  # whatever the module raises
        raise InvalidConfig(f"the module of {name} cannot be imported: {_first_line(error)}") from error


def _writable(folder: Path) -> None:
    """Make a folder. Raise InvalidConfig where nothing can be kept in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidConfig(f"the folder {folder} cannot be filled: {error}") from error


def _first_line(error: Exception) -> str:
    """Return an error's class and the first line of its message."""
    said = str(error).splitlines()[:1]
    return ": ".join([type(error).__name__, *said])


def _type_of(text: str) -> tuple[Any, tuple[int, ...]]:
    import torch

    parts = SHAPE.fullmatch(text.strip())
    dtype = getattr(torch, parts["dtype"], None) if parts else None
    if parts is None or not isinstance(dtype, torch.dtype):
        raise InvalidConfig(f"{text!r} is no tensor; say its dtype and sizes, such as float32[4, 8].")
    return dtype, tuple(int(each) for each in parts["sizes"].split(",") if each.strip())
