"""Compiles the layers of our own decoders, without Dynamo: equal layers, as their specs say, are one program.

    programs = LayerPrograms()
    compile_layers(decoder, programs)       # decoder(...) runs them from here on, and its first call compiles

A layer's tensors are inputs of its program. Attention stays what the layer's state does with the projected heads, since
that reads and writes memory of its own: the program calls it in its place. So one program serves layers that differ in
weights and in what they keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.compiler.artifacts import artifact_key
from ridgeline.compiler.backend import MOST_SHAPES, CompilationStages, CompilerOptions, compile_graph, decompositions
from ridgeline.compiler.program import CompiledProgram
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ABSENT, AttentionSpec, LayerSpec, MLPSpec
from ridgeline.layers.attention import AttentionBehind
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.layer import Layer


@torch.library.custom_op("ridgeline::attended_by_state", mutates_args=())
def _attended(qkv_TX: Tensor, positions_T: Tensor, width: int) -> Tensor:
    """Stands for what a layer's state does. It is traced, and never runs."""
    raise NotImplementedError


@_attended.register_fake
def _(qkv_TX: Tensor, positions_T: Tensor, width: int) -> Tensor:
    return qkv_TX.new_empty((qkv_TX.shape[0], width))


class _TracedState:
    """The state of a layer that is traced."""

    def __init__(self, width: int) -> None:
        self._width = width

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: object, buffer: object = None) -> Tensor:
        return _attended(qkv_TX, positions_T, self._width)


class LayerProgram:
    """The program of one kind of layer. It runs one layer at a time."""

    def __init__(self, graph: fx.GraphModule, options: CompilerOptions, stages: CompilationStages) -> None:
        self._run: Callable[[Tensor, Tensor], Tensor] | None = None
        for node in graph.graph.nodes:
            if node.target is torch.ops.ridgeline.attended_by_state.default:
                node.target, node.args = self._attend, node.args[:2]
        self.program: CompiledProgram = compile_graph(graph, stages, options=options)

    def _attend(self, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        assert self._run is not None
        return self._run(qkv_TX, positions_T)

    def __call__(self, inputs: list[Tensor], attend: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, ...]:
        """Run the layer with its tensors. attend: makes of projected heads and positions what the output projects."""
        self._run = attend
        try:
            return self.program(*inputs)
        finally:
            self._run = None


@dataclass
class LayerPrograms:
    """The programs of all kinds of layers and shapes, by structural hash. seconds: that each took to make."""

    options: CompilerOptions = field(default_factory=CompilerOptions)
    made: dict[str, LayerProgram] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, CompilationStages] = field(default_factory=dict)

    def program(
        self, layer: Layer, tensors: dict[str, Tensor], x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor
    ) -> LayerProgram | None:
        """Return the program for a call of a layer; None if there are as many shapes of its kind as are kept."""
        key = structural_hash(layer.spec, tensors, x_TM, residual_TM, self.options)
        if key not in self.made:
            if len(self.made) >= MOST_SHAPES:
                return None
            began, self.stages[key] = time.perf_counter(), CompilationStages()
            graph = traced_layer(layer, tensors, x_TM, residual_TM, positions_T)
            self.stages[key].seconds["trace"] = time.perf_counter() - began
            self.made[key] = LayerProgram(graph, self.options, self.stages[key])
            self.seconds[key] = time.perf_counter() - began
        return self.made[key]


def structural_hash(
    spec: LayerSpec, tensors: dict[str, Tensor], x_TM: Tensor, residual_TM: Tensor | None, options: CompilerOptions
) -> str:
    """Return a digest of what decides a layer's program: its spec, and the shapes and dtypes of what it takes."""
    shapes = {name: (tuple(each.shape), each.stride(), each.dtype) for name, each in tensors.items()}
    call = (tuple(x_TM.shape), x_TM.dtype, x_TM.device.type, residual_TM is None)
    return artifact_key("layer", repr((spec, sorted(shapes.items(), key=str), call, options)))


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


@torch.no_grad()
def traced_layer(
    layer: Layer, tensors: dict[str, Tensor], x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor
) -> fx.GraphModule:
    """Return the graph of aten's ops of a layer: from its tensors, x, positions and the residual, if there is one, to
    its two outputs.

    Raise InvalidConfig if it uses a tensor that is not its own: equal layers would not be one program.
    """
    assert isinstance(layer.spec.mixer, AttentionSpec)
    state = _TracedState(layer.spec.mixer.q_size)

    def function(x: Tensor, positions: Tensor, *residual: Tensor) -> Any:
        return layer(x, *(residual or (None,)), positions, state, None)

    given = [x_TM, positions_T, *([] if residual_TM is None else [residual_TM])]
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    names, first = {id(each): name for name, each in tensors.items()}, next(iter(module.graph.nodes))
    inputs: dict[str, fx.Node] = {}
    with module.graph.inserting_before(first):
        for at, (name, each) in enumerate(tensors.items()):
            inputs[name] = module.graph.placeholder(f"own_{at}")
            inputs[name].meta["val"] = each
    for node in [each for each in module.graph.nodes if each.op == "get_attr"]:
        tensor = getattr(module, str(node.target))
        if id(tensor) not in names:
            raise InvalidConfig(f"a layer uses a tensor of shape {list(tensor.shape)} that is none of its own.")
        node.replace_all_uses_with(inputs[names[id(tensor)]])
        module.graph.erase_node(node)
    module.recompile()
    functional = torch.func.functionalize(module, remove="mutations")
    return make_fx(functional, decompositions(), "fake")(*tensors.values(), *given)


class CompiledLayer(nn.Module):
    """A layer that runs its kind's program."""

    def __init__(self, layer: Layer, programs: LayerPrograms) -> None:
        super().__init__()
        self.layer, self._programs = layer, programs
        self._known: dict[object, LayerProgram | None] = {}  # by what the call has of the structural hash
        self.spec, self.feed_forward, self.mixer = layer.spec, layer.feed_forward, layer.mixer

    @property
    def sums_first(self) -> bool:
        return False

    def forward(
        self, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Any, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As the layer's own."""
        tensors, call = tensors_of(self.layer), (x_TM.shape, x_TM.dtype, residual_TM is None)
        if call not in self._known:
            self._known[call] = self._programs.program(self.layer, tensors, x_TM, residual_TM, positions_T)
        if (program := self._known[call]) is None:
            made: tuple[Tensor, Tensor | None] = self.layer(x_TM, residual_TM, positions_T, state, *rest, **named)
            return made
        assert isinstance(self.layer.mixer, AttentionBehind)
        heads = self.layer.mixer.heads
        given = [*tensors.values(), x_TM, positions_T, *([] if residual_TM is None else [residual_TM])]
        x_TM, residual_TM = program(given, lambda qkv_TX, at_T: state.attend(qkv_TX, at_T, heads))
        return x_TM, residual_TM


def check_compiled(spec: LayerSpec) -> None:
    """Raise InvalidConfig, naming the part, for a layer that is not attention and a dense feed-forward."""
    if not isinstance(spec.mixer, AttentionSpec) or not isinstance(spec.feed_forward, MLPSpec):
        parts = [part.kind for part in (spec.mixer, spec.feed_forward) if part is not ABSENT]
        raise InvalidConfig(f"layers of attention and a dense feed-forward are compiled, and this one has {parts}.")
    if spec.inputs is not None or spec.embedded:
        raise InvalidConfig("layers that take more than the residual are not compiled.")


def compile_layers(decoder: Decoder, programs: LayerPrograms) -> None:
    """Let the layers of a decoder run the programs of their kinds, which are made at their first call.

    Raise InvalidConfig for a layer that is not compiled, or a decoder that is divided over ranks or streamed.
    """
    if decoder.tp.size > 1:
        raise InvalidConfig("a decoder that is divided over ranks is not compiled layer by layer.")
    if decoder.streamed is not None:
        raise InvalidConfig("a decoder whose layers come from the host's memory is not compiled layer by layer.")
    layers = [each for each in decoder.layers if isinstance(each, Layer)]
    if len(layers) < len(decoder.layers):
        raise InvalidConfig("the decoder's layers are not plain ones; it may be compiled already.")
    for layer in layers:
        check_compiled(layer.spec)
    decoder.layers = nn.ModuleList(CompiledLayer(layer, programs) for layer in layers)
