"""The back end of torch.compile: AOTAutograd's graphs, forward and backward, through the passes to a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.compiler.artifacts import ArtifactStore, default_store
from ridgeline.compiler.capture import HALF, capture
from ridgeline.compiler.graph import OpGraph, verify
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.passes.fuse import fuse
from ridgeline.compiler.passes.products import products
from ridgeline.compiler.passes.widen import widen
from ridgeline.compiler.program import CompiledProgram
from ridgeline.compiler.targets import CpuTarget, Target, target_of
from ridgeline.core.errors import InvalidConfig

MOST_SHAPES = 16  # programs of one graph
ROUNDINGS = ("torch", "float32")
PRODUCTS = ("torch", "joined")


@dataclass(frozen=True)
class CompilerOptions:
    """The options of `torch.compile(model, backend="ridgeline", options={…})`.

    rounding: "torch": numbers of 16 bits are rounded after each op, as torch does. "float32": once, where a kernel
    writes them (passes/widen.py). artifacts: folders of machine code, searched behind this user's cache. products: on
    Hopper, "torch": torch's, with a kernel behind them; "joined": our own with their epilogues.
    """

    rounding: str = "torch"
    artifacts: tuple[Path, ...] = ()
    products: str = "torch"

    def __post_init__(self) -> None:
        if self.products not in PRODUCTS:
            raise InvalidConfig(f"products is {self.products!r}; say {' or '.join(PRODUCTS)}.")
        if self.rounding not in ROUNDINGS:
            raise InvalidConfig(f"rounding is {self.rounding!r}; say {' or '.join(ROUNDINGS)}.")

    @classmethod
    def of(cls, named: Mapping[str, Any] | None) -> CompilerOptions:
        """Return the options of a dictionary. Raise InvalidConfig for a name that is none."""
        known = {each.name for each in fields(cls)}
        if unknown := set(named or ()) - known:
            raise InvalidConfig(f"there is no option {sorted(unknown)[0]!r}; there are {', '.join(sorted(known))}.")
        given = dict(named or {})
        folders = given.pop("artifacts", ())
        places = (folders,) if isinstance(folders, str | Path) else folders
        return cls(artifacts=tuple(Path(each) for each in places), **given)

    @property
    def passes(self) -> dict[str, Callable[[OpGraph], OpGraph]]:
        """The passes in order, by name."""
        last = {"widen": widen} if self.rounding == "float32" else {}
        return {"canonicalize": canonicalize, "fuse": fuse, **last}


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


def _variance_and_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance and the mean as aten.var_mean does, by two reductions, the mean first: what kernels know."""
    if not x.is_floating_point():
        return NotImplemented
    dims = list(dim or range(x.dim()))
    count = torch.Size([x.shape[at] for at in dims]).numel()
    wide = x.float() if x.dtype in HALF else x
    mean = wide.mean(dims, keepdim=True)
    apart = wide - mean
    free = max(count - (1 if correction is None else correction), 0)
    variance, mean = ((apart * apart).sum(dims, keepdim=True) / free).to(x.dtype), mean.to(x.dtype)
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return functions by which ops that capture does not know are made from those that it knows."""
    from torch._decomp import get_decompositions

    return {**get_decompositions(DECOMPOSED), aten.var_mean.correction: _variance_and_mean}


@dataclass
class CompilationStages:
    """The text of a graph after each pass, and the seconds that it took."""

    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def after(self, name: str, began: float, graph: OpGraph) -> None:
        self.seconds[name] = time.perf_counter() - began
        self.texts[name] = str(graph)


def compile_graph(
    module: fx.GraphModule,
    stages: CompilationStages | None = None,
    target: Target | None = None,
    options: CompilerOptions | None = None,
    device: str = "",
) -> CompiledProgram:
    """Return the program of a functional graph of aten's ops. stages: gets what each pass makes. target: by default
    that of the device on which the graph's tensors are, or the CPU. device: the type of the devices on which they are,
    if it is not the target's."""
    stages = CompilationStages() if stages is None else stages
    began = time.perf_counter()
    options = options or CompilerOptions()
    target = target or _target(module, options)
    graph = verify(capture(module, device or target.device))
    stages.after("capture", began, graph)
    passes = dict(options.passes)
    if target.device == "cpu" or options.products == "joined":
        passes["products"] = partial(products, worth=target.multiplies)
    for name, each in passes.items():
        began = time.perf_counter()
        graph = verify(each(graph))
        stages.after(name, began, graph)
    began = time.perf_counter()
    program = CompiledProgram(graph, target)
    stages.seconds["kernels"] = time.perf_counter() - began
    return program


def _target(module: fx.GraphModule, options: CompilerOptions) -> Target:
    """Return the target of the first tensor of a graph that is on a device with one."""
    cached = default_store().folders
    store = ArtifactStore([*cached, *options.artifacts])
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (found := target_of(value.device, store)) and found.device != "cpu":
            return found
    return CpuTarget()


class ShapePrograms:
    """A graph with sizes that are not known: a program for each set of shapes that it is called with, MOST_SHAPES of
    them. Other shapes run op by op."""

    def __init__(self, module: fx.GraphModule, options: CompilerOptions) -> None:
        self._module, self._options = module, options
        self.programs: dict[object, CompiledProgram] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple((each.shape, each.stride()) if isinstance(each, torch.Tensor) else each for each in arguments)
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= MOST_SHAPES:
                return self._module(*arguments)
            graph = make_fx(self._module, tracing_mode="fake")(*arguments)
            program = self.programs[key] = compile_graph(graph, options=self._options)
        return program(*arguments)


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the function of a graph that Dynamo gives; `torch.compile(f, backend="ridgeline")` calls it.

    options: fields of CompilerOptions by name. Raise InvalidConfig for others.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    wanted = CompilerOptions.of(options)

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        symbolic = any(isinstance(each, torch.SymInt) for each in inputs)
        program = ShapePrograms(graph, wanted) if symbolic else compile_graph(graph, options=wanted)
        made: Callable[..., Any] = make_boxed_func(program)
        return made

    whole: Callable[..., Any] = aot_autograd(fw_compiler=compiled, decompositions=decompositions())
    made: Callable[..., Any] = whole(module, inputs)
    return made
