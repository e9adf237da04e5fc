"""One function by several compilers on a CPU: an RMS norm, a gated feed-forward and a residual in float32.

    python -m ridgeline_bench.scripts.stack.compilers [--ways torch inductor ridgeline xla] [--output results.jsonl]

Ways: torch op by op, Inductor, our compiler, ONNX Runtime (the extra `onnx`), XLA (jax), IREE (iree-base-compiler and
iree-base-runtime, which take StableHLO that jax writes) and TVM (apache-tvm, with its default pipeline, untuned). The
last three are in no extra; a way whose package is missing is left out by a sentence. A line has the seconds until the
function was ready, and the median milliseconds of a call in turns with the others; it must agree with torch before.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline_bench.scripts.asked import OneOf, asked, check_counts, keep, told

Run = Callable[[], Any]  # a call whose result is a number of arrays' worth, ready when it returns
EPS = 1e-5


class GatedBlock(nn.Module):
    """x + down(silu(gate) * up) of a normed x: [T, M]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / shape[0] ** 0.5, requires_grad=False)

        self.norm, self.gate_up, self.down = drawn(width), drawn(width, 2 * hidden), drawn(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.rms_norm(x, x.shape[-1:], self.norm, EPS)
        gate, up = (y @ self.gate_up).chunk(2, dim=-1)
        return x + (functional.silu(gate) * up) @ self.down


def of_torch(block: GatedBlock, x: Tensor) -> Run:
    return partial(block, x)


def of_inductor(block: GatedBlock, x: Tensor) -> Run:
    made = torch.compile(block, dynamic=False)
    return partial(made, x)


def of_ours(block: GatedBlock, x: Tensor) -> Run:
    made = torch.compile(block, backend="ridgeline", dynamic=False)
    return partial(made, x)


def of_onnx_runtime(block: GatedBlock, x: Tensor) -> Run:
    ort = importlib.import_module("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "block.onnx"
        torch.onnx.export(block, (x,), str(file), dynamo=True, opset_version=23, verbose=False)
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = ort.InferenceSession(str(file), options)
    name, given = session.get_inputs()[0].name, x.numpy()
    return lambda: session.run(None, {name: given})[0]


def _of_jax(block: GatedBlock) -> tuple[Any, Any]:
    jax = importlib.import_module("jax")
    jnp = importlib.import_module("jax.numpy")
    jax.config.update("jax_platforms", "cpu")
    norm, gate_up, down = (each.numpy() for each in (block.norm, block.gate_up, block.down))

    def function(x: Any) -> Any:
        y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * norm
        gate, up = jnp.split(y @ gate_up, 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ down

    return jax, function


def of_xla(block: GatedBlock, x: Tensor) -> Run:
    jax, function = _of_jax(block)
    made, given = jax.jit(function), jax.numpy.asarray(x.numpy())
    return lambda: np.asarray(made(given).block_until_ready())


def of_iree(block: GatedBlock, x: Tensor) -> Run:
    compiler, runtime = (importlib.import_module(f"iree.{name}") for name in ("compiler", "runtime"))
    jax, function = _of_jax(block)
    text = str(jax.jit(function).lower(jax.ShapeDtypeStruct(x.shape, "float32")).compiler_ir("stablehlo"))
    options = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3"]
    code = compiler.compile_str(text, target_backends=["llvm-cpu"], input_type="stablehlo", extra_args=options)
    config = runtime.Config("local-task")
    context = runtime.SystemContext(config=config)
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, code))
    main = next(iter(vars(context.modules).values()), None) or context.modules.jit_function
    given = x.numpy()
    return lambda: np.asarray(main["main"](given))


def of_tvm(block: GatedBlock, x: Tensor) -> Run:
    tvm = importlib.import_module("tvm")
    front = importlib.import_module("tvm.relax.frontend.torch")
    exported = torch.export.export(block, (x,)).run_decompositions()
    module = front.from_exported_program(exported)
    built = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "num-cores": torch.get_num_threads()}))
    machine, given = tvm.relax.VirtualMachine(built, tvm.cpu()), tvm.runtime.tensor(x.numpy())

    def run() -> Any:
        return machine["main"](given)[0].numpy()

    return run


WAYS: dict[str, Callable[[GatedBlock, Tensor], Run]] = {
    "torch": of_torch, "inductor": of_inductor, "ridgeline": of_ours, "onnxruntime": of_onnx_runtime, "xla": of_xla,
    "iree": of_iree, "tvm": of_tvm,
}  # fmt: skip
PACKAGES = {"torch": "torch", "inductor": "torch", "xla": "jax", "iree": "iree.compiler", "tvm": "tvm"}


def version(way: str) -> str:
    """Return the version of a way's package."""
    found = importlib.import_module(PACKAGES.get(way, way))
    return str(getattr(found, "__version__", "") or importlib.import_module("iree.compiler.version").VERSION)


@torch.no_grad()
def lines(ways: list[str], tokens: int, width: int, hidden: int, rounds: int) -> list[dict[str, Any]]:
    """Return a line for each way that is installed. Raise AssertionError if one differs from torch."""
    block, x = GatedBlock(width, hidden).eval(), torch.randn(tokens, width, generator=torch.Generator().manual_seed(1))
    want, runs, found = block(x).numpy(), dict[str, Run](), list[dict[str, Any]]()
    for way in ways:
        began = time.perf_counter()
        try:
            run = WAYS[way](block, x)
        except ImportError as error:
            print(f"{way} is left out: {error}.")
            continue
        np.testing.assert_allclose(np.asarray(run()), want, rtol=1e-3, atol=1e-4)
        runs[way] = run
        found.append({"way": way, "version": version(way), "ready_s": time.perf_counter() - began})
    times: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(rounds + 2):
        for way in list(runs)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            runs[way]()
            times[way].append(time.perf_counter() - began)
    shape = {"tokens": tokens, "width": width, "hidden": hidden, "threads": torch.get_num_threads()}
    least = {way: 1e3 * min(each[2:]) for way, each in times.items()}
    median = {way: 1e3 * statistics.median(each[2:]) for way, each in times.items()}
    return [
        {"workload": "compilers", **shape, **line, "ms": median[line["way"]], "least_ms": least[line["way"]]}
        for line in found
    ]


def main() -> None:
    a = asked(
        __doc__, ways=([OneOf(tuple(WAYS))], "of compiling"), tokens=(64, "rows of x"), width=(512, "of x"),
        hidden=(1024, "of the feed-forward"), rounds=(15, "calls of each way"), output=(Path, "the file of results"),
    )  # fmt: skip
    with told():
        check_counts(a, "tokens", "width", "hidden", "rounds")
        for line in lines(a.ways, a.tokens, a.width, a.hidden, a.rounds):
            keep(a.output, line)
            print(f"{line['way']:12} {line['version']:14} {line['ready_s']:7.2f} s {line['ms']:8.3f} ms")


if __name__ == "__main__":
    main()
