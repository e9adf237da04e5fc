"""Linear layers with what follows them, each compiled to a product with its epilogue: beside torch op by op, torch's
product with a kernel of the compiler behind it, and Inductor.

    python -m ridgeline_bench.scripts.compiled_layers --carry FOLDER                      # where MLIR is
    python -m ridgeline_bench.scripts.compiled_layers --artifacts FOLDER --output FILE    # where the GPU is

A layer has the widths of Llama 3.1 8B in bfloat16. Each way is compared with torch before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.compiler.artifacts import ArtifactStore
from ridgeline.compiler.backend import CompilerOptions, compile_graph, decompositions
from ridgeline.compiler.program import CompiledProgram
from ridgeline.compiler.targets import CudaTarget
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.machine.timing import Effort, median_seconds
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

WIDTH, INNER = 4096, 14336
TARGET = "sm_90"
Layer = Callable[..., Tensor]


def linear_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, w, b))


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, w)) * functional.linear(x, v)


def with_residual(h: Tensor, d: Tensor, x: Tensor) -> Tensor:
    return functional.linear(h, d) + x


LAYERS: dict[Layer, tuple[tuple[int, ...], ...]] = {
    linear_silu: ((0, WIDTH), (INNER, WIDTH), (INNER,)),
    gated: ((0, WIDTH), (INNER, WIDTH), (INNER, WIDTH)),
    with_residual: ((0, INNER), (WIDTH, INNER), (0, WIDTH)),
}  # shapes of what each takes; 0: as many rows as tokens


def program_of(layer: Layer, inputs: list[Tensor], target: CudaTarget, products: str = "joined") -> CompiledProgram:
    """Return a layer's program, traced without Dynamo. The tensors may be fake ones."""
    from functorch.compile import aot_function, make_boxed_func

    made: list[CompiledProgram] = []

    def compiled(graph: torch.fx.GraphModule, _: object) -> Any:
        made.append(compile_graph(graph, target=target, options=CompilerOptions(products=products)))
        return make_boxed_func(graph.forward)

    aot_function(layer, fw_compiler=compiled, decompositions=decompositions())(*inputs)
    return made[0]


def inputs_of(layer: Layer, tokens: int, draw: Callable[..., Tensor]) -> list[Tensor]:
    shapes = [tuple(size or tokens for size in shape) for shape in LAYERS[layer]]
    return [draw(shape, device="cuda").to(torch.bfloat16) for shape in shapes]


def carry(folder: Path, tokens: list[int]) -> int:
    """Compile the layers' kernels into a folder, and return how many it has."""
    from torch._subclasses import FakeTensorMode

    target = CudaTarget(TARGET, ArtifactStore([folder]))
    for products in ("joined", "torch"):
        for layer in LAYERS:
            for count in tokens:
                with FakeTensorMode():
                    for why in program_of(layer, inputs_of(layer, count, torch.empty), target, products).fallbacks:
                        print(getattr(layer, "__name__", layer), count, why)
    return len(list(folder.glob("*.kernel")))


def measured(layer: Layer, tokens: int, folder: Path, *, inductor: bool) -> dict[str, float]:
    """Return µs by way. Raises InvalidConfig if a way's result is wrong."""
    torch.manual_seed(0)
    inputs = inputs_of(layer, tokens, torch.randn)
    for weight in inputs[1:]:
        weight *= 0.02
    wanted = layer(*(each.double() for each in inputs))
    ways: dict[str, Callable[[], Any]] = {"torch": lambda: layer(*inputs)}
    for name, products in (("joined", "joined"), ("a kernel behind", "torch")):
        program = program_of(layer, inputs, CudaTarget(TARGET, ArtifactStore([folder])), products)
        if program.fallbacks:
            raise InvalidConfig(f"{tokens} tokens, {name}: {program.fallbacks[0]}")
        ways[name] = lambda program=program: program(*inputs)[0]  # type: ignore[misc]
    if inductor:
        torch._dynamo.reset()
        theirs = torch.compile(layer, dynamic=False)
        ways["Inductor"] = lambda: theirs(*inputs)
    device, found = torch.device("cuda"), dict[str, float]()
    for name, way in ways.items():
        apart = (way().double() - wanted).abs() / wanted.abs().clamp_min(0.05)
        if not bool((apart < 0.05).all()):
            raise InvalidConfig(f"{tokens} tokens, {name}: off by {apart.max().item():.3f} of a number.")
    for _ in range(3):
        for name, way in ways.items():
            us = 1e6 * median_seconds([way], device, Effort(seconds=0.03, repeats=5))
            found[name] = min(us, found.get(name, us))
    return found


def main() -> None:
    a = asked(
        __doc__,
        tokens=([512, 2048, 8192], "rows of a layer's input"),
        carry=(Path, "fill this folder with kernels, and measure nothing"),
        artifacts=(Path, "the folder of kernels"),
        inductor=(2048, "tokens for which Inductor's code is timed as well"),
        commit=("", "of the checkout, where git cannot say it"),
        output=(Path, "the file of results"),
    )
    with told():
        check_counts(a, "tokens")
        if a.carry:
            print(f"{carry(a.carry, a.tokens)} kernels in {a.carry}")
            return
        if a.artifacts is None:
            raise InvalidConfig("name the folder of kernels: --artifacts FOLDER.")
        machine = asdict(host_with(torch.device("cuda"), a.commit))
        for layer in LAYERS:
            for tokens in a.tokens:
                us = measured(layer, tokens, a.artifacts, inductor=tokens == a.inductor)
                name = getattr(layer, "__name__", "")
                shown = ", ".join(f"{way} {each:.1f}" for way, each in us.items())
                print(f"  {name:14} {tokens:5} tokens, µs: {shown}", flush=True)
                line = {"workload": "compiled layer", "layer": name, "tokens": tokens, "us": us}
                keep(a.output, {"machine": machine, **line})


if __name__ == "__main__":
    main()
