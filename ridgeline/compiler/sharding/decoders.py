"""Our own decoders as graphs: the whole model to be partitioned, or a rank's part as layers divide it by hand.

The annotations that give the division by hand follow from the shapes of the two (`core.plan.sharding.part_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ridgeline.compiler.graph import GraphNode, OpGraph
from ridgeline.compiler.sharding.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, MeshCollective
from ridgeline.compiler.sharding.trace import TracedModule, tensors_of, traced_module
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import dense_states
from ridgeline.layers.linear import Linear
from ridgeline.parallel.mesh import Mesh

CPU = torch.device("cpu")
TRACED_OPS = Ops(Platform(device_type="cpu"), dict.fromkeys(("linear", "norm_linear"), "torch"))  # others pack weights


@torch.library.custom_op("ridgeline::communicated", mutates_args=())
def communicated(x: Tensor, kind: str, axis: str, dim: int, ranks: int) -> Tensor:
    """Stands for a collective of a rank's graph. It is traced, and never runs."""
    raise NotImplementedError


@communicated.register_fake
def _(x: Tensor, kind: str, axis: str, dim: int, ranks: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = {ALL_GATHER: shape[dim] * ranks, REDUCE_SCATTER: shape[dim] // ranks}.get(kind, shape[dim])
    return x.new_empty(shape)


class TracedAxis:
    """An axis whose collectives are nodes of the graph that is traced. name: as the mesh of the graph has it."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        self.rank, self.size, self._name = rank, size, name

    def all_reduce(self, x: Tensor) -> Tensor:
        return communicated(x, ALL_REDUCE, self._name, 0, self.size)

    def all_gather(self, x: Tensor) -> Tensor:
        return communicated(x, ALL_GATHER, self._name, x.dim() - 1, self.size)

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        return communicated(x_TM, REDUCE_SCATTER, self._name, 0, self.size)

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        return communicated(x_TM, ALL_GATHER, self._name, 0, self.size)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(self.all_reduce(x_TM), residual_TM, weight_M, eps)

    def smallest(self, value: int) -> int:
        return value


class _Scores(nn.Module):
    """All scores of sequences that a decoder reads from their beginning."""

    def __init__(self, decoder: Decoder, batch: int) -> None:
        super().__init__()
        self.decoder, self._batch = decoder, batch

    def forward(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        decoder = self.decoder
        states = dense_states(decoder.spec, self._batch, len(ids_T) // self._batch, decoder.dtype, ids_T.device)
        return decoder.logits(decoder(ids_T, positions_T, states))


def traced_decoder(
    spec: ModelSpec, tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float32, mesh: Mesh | None = None
) -> TracedModule:
    """Return the graph of a decoder's scores [T, V] of `tokens` tokens, in sequences of equal length. The inputs behind
    the parameters are token ids and positions, int64 [T].

    mesh: the part of a rank is traced, with its collectives as nodes.

    Raises InvalidConfig for mixtures of experts, whose rows depend on values.
    """
    if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers):
        raise InvalidConfig("a mixture's experts get rows by their scores, which no graph of fixed shapes has.")
    with FakeTensorMode():
        decoder = Decoder(spec, TRACED_OPS, dtype=dtype, device=CPU, max_positions=tokens, mesh=mesh)
        decoder.prepare()
        scores = _Scores(decoder, batch)
        inputs = [torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)]
        made = traced_module(scores, inputs)
    return replace(made, graph=with_collectives(made.graph))


def with_collectives(graph: OpGraph) -> OpGraph:
    """Return the graph with collectives in the place of what stands for them."""

    def changed(node: GraphNode) -> GraphNode:
        if node.attributes.get("target") is not torch.ops.ridgeline.communicated.default:
            return node
        x, kind, axis, dim, _ = node.attributes["arguments"]
        target = MeshCollective(kind, axis, dim)
        return replace(node, attributes={"target": target, "arguments": (x,), "named": {}})

    return replace(graph, nodes=tuple(map(changed, graph.nodes)))


def divisions(spec: ModelSpec, ranks: int, axis: str) -> dict[str, str]:
    """Return the annotations of a decoder's parameters by which `ranks` ranks divide it as layers do by hand, by the
    names of `traced_decoder`. Raise InvalidConfig if they cannot, or hold parts that overlap."""
    whole, part = (_on_meta(spec, mesh) for mesh in (Mesh(), Mesh(tp=TracedAxis(0, ranks, axis))))
    own, found = tensors_of(part), dict[str, str]()
    for name, tensor in tensors_of(whole).items():
        module = whole.get_submodule(name.rpartition(".")[0])
        sizes = zip(tensor.shape, own[name].shape, strict=True)
        dims = [axis if mine < size else "-" for size, mine in sizes]
        if dims and dims[0] == axis and isinstance(module, Linear) and len(module.columns) > 1:
            inside = part.get_submodule(name.rpartition(".")[0])
            assert isinstance(inside, Linear)
            if [size // ranks for size in module.columns] != list(inside.columns):
                raise InvalidConfig(f"{ranks} ranks hold parts of {name} that overlap, which no annotation says.")
            dims[0] += ":" + "/".join(map(str, module.columns))
        if axis in "".join(dims):
            found[f"decoder.{name}"] = ",".join(dims)
    return found


def _on_meta(spec: ModelSpec, mesh: Mesh) -> Decoder:
    return Decoder(spec, TRACED_OPS, dtype=torch.float32, device=torch.device("meta"), max_positions=16, mesh=mesh)


def inputs_of(made: TracedModule, decoder: nn.Module, given: Sequence[Tensor]) -> list[Any]:
    """Return the inputs of a graph of `traced_decoder`: a decoder's tensors by their names, and the other inputs."""
    tensors: Mapping[str, Tensor] = {f"decoder.{name}": tensor for name, tensor in tensors_of(decoder).items()}
    tensors = {**tensors, **{f"input {at}": each for at, each in enumerate(given)}}
    return [tensors[name].detach() for name in made.names]
