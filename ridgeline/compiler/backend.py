"""The back end of torch.compile: AOTAutograd's graphs, forward and backward, through the passes to a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ridgeline.compiler.capture import capture
from ridgeline.compiler.graph import Graph, verify
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.passes.fuse import fuse
from ridgeline.compiler.program import Program

PASSES: dict[str, Callable[[Graph], Graph]] = {"canonicalize": canonicalize, "fuse": fuse}

aten = torch.ops.aten
DECOMPOSED = (  # into ops that capture knows
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten.silu,
    aten.silu_backward,
    aten.gelu,
    aten.gelu_backward,
    aten.sigmoid_backward,
    aten.tanh_backward,
    aten.threshold_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten.addcmul,
    aten.softplus,
    aten.masked_fill,
    aten.clamp,
    aten.clamp_min,
    aten.clamp_max,
    aten.rsub,
    aten.mse_loss,
)


@dataclass
class CompilationStages:
    """The text of a graph after each pass, and the seconds that it took."""

    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def after(self, name: str, began: float, graph: Graph) -> None:
        self.seconds[name] = time.perf_counter() - began
        self.texts[name] = str(graph)


def compile_graph(module: fx.GraphModule, stages: CompilationStages | None = None) -> Program:
    """Return the program of a functional graph of aten's ops. stages: gets what each pass makes."""
    stages = CompilationStages() if stages is None else stages
    began = time.perf_counter()
    graph = verify(capture(module))
    stages.after("capture", began, graph)
    for name, each in PASSES.items():
        began = time.perf_counter()
        graph = verify(each(graph))
        stages.after(name, began, graph)
    began = time.perf_counter()
    program = Program(graph)
    stages.seconds["kernels"] = time.perf_counter() - began
    return program


def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile what Dynamo gives; `torch.compile(f, backend="ridgeline")` calls it."""
    from functorch.compile import make_boxed_func
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compile_graph(graph))

    made: Callable[..., Any] = aot_autograd(fw_compiler=compiled, decompositions=get_decompositions(DECOMPOSED))(
        module, inputs
    )
    return made
