"""Attention layers. They do not own the state that is kept between steps: they are given it.

Legend:
    T  tokens of the step
    M  model width
    H  query heads
    G  key/value heads
    D  head width
    L  distances of keys from queries
    S  vectors of distances
    X  (H + 2 G) D, columns of the fused projection, behind those of gates; (H + G) D if values are the keys' projection
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.model import AttentionSpec, Disentangled, NormSpec, Relative
from ridgeline.kernels.attention.packed.disentangled import Distances
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.rotary.op import split_heads
from ridgeline.layers.build import Build
from ridgeline.layers.heads import GridVectors, Heads
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.rotary import grown


class Attends(Protocol):
    """The state of one attention layer: what it keeps of earlier tokens."""

    def attend(
        self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None
    ) -> Tensor | Rounded:
        """Normalise and rotate the step's heads, store their keys and values, and attend with the queries. Returns [T,
        H * D], or `buffer` if the result was rounded there."""


class Keeps(Protocol):
    """The state of one attention layer that takes keys and values of tokens whose queries are not asked for."""

    def keep(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> None:
        """Normalise and rotate the step's heads, and store their keys and values."""


class AttentionBehind(nn.Module):
    """Causal grouped-query attention behind its fused projection to q, k and v, and to gates if there are any.

    multiplier: that of its output. projection: its own, if it has one, so that it comes first.
    """

    slopes_H: Tensor | None
    sinks: nn.Parameter | None
    kv_scales: nn.Parameter | None
    qkv: Linear
    saturated_1: Tensor | None

    def __init__(
        self,
        spec: AttentionSpec,
        width: int,
        build: Build,
        multiplier: float = 1.0,
        projection: Linear | None = None,
    ) -> None:
        super().__init__()
        if projection is not None:
            self.qkv = projection
        self.spec = spec
        self.ops = build.ops
        self.out = Linear(
            spec.out_size, (width,), spec.out_bias, build.within("out"), over=build.sums,
            multipliers=((width, multiplier * spec.multiplier),),
        )  # fmt: skip
        self.tp = build.mesh.tp
        norms = [Norm(norm, norm_width, build) for norm, norm_width in spec.norms]
        self.q_norm: Norm | None = norms[0] if norms else None
        self.k_norm: Norm | None = norms[1] if len(norms) > 1 else None
        self.head_norm: Norm | None = None
        if spec.qk_norm is not None and spec.qk_norm_apart:
            self.head_norm = Norm(replace(spec.qk_norm, weightless=True), spec.head_dim, build)
        self.rotary = build.rotary(spec.rope) if spec.rope is not None else None
        self.sinks = build.parameter(spec.num_heads) if spec.sinks else None
        given = spec.kv_format.scales == "model"
        self.kv_scales = build.parameter(spec.num_kv_heads, 2, dtype=torch.float32) if given else None
        counter_1 = torch.zeros(1, dtype=torch.int64, device=build.device) if given else None
        self.register_buffer("saturated_1", counter_1, persistent=False)
        slopes_H = self._slopes().to(build.device) if spec.alibi else None
        self.register_buffer("slopes_H", slopes_H, persistent=False)
        bias: PositionBias | None = None
        if spec.relative is not None:
            name, relative = build.within("position_bias"), spec.relative
            bias = build.shared(relative, lambda: PositionBias(relative, spec.num_heads, name))
        self.position_bias = bias if spec.relative_owner else None  # so that its parameter has one name
        self._bias = (bias,)
        places = (2 * spec.grid - 1, spec.head_dim) if spec.grid else (0, 0)
        self.grid_rows, self.grid_columns = (build.parameter(*places) if spec.grid else None for _ in range(2))
        apart: DistanceVectors | None = None
        if spec.disentangled is not None:
            inside, vectors = build.within("distances"), spec.disentangled
            apart = build.shared(vectors, lambda: DistanceVectors(vectors, width, inside))
        self.distances = apart if spec.relative_owner else None
        self._distances = (apart,)

    def mixed(self, qkv_TX: Tensor, positions_T: Tensor, state: Attends) -> Tensor:
        """Return attention's output for its projection: [T, M]."""
        spec, gate_TX, gate_TH = self.spec, None, None
        if spec.head_gates:
            qkv_TX, gate_TH = qkv_TX.tensor_split((-spec.num_heads,), dim=-1)
        if spec.output_gate:
            gate_TX, qkv_TX = qkv_TX.tensor_split((spec.q_size,), dim=-1)
        if spec.qk_norm_whole and self.q_norm is not None and self.k_norm is not None:
            q_TX, k_TX, v_TX = qkv_TX.tensor_split((spec.q_size, spec.q_size + spec.kv_size), dim=-1)
            qkv_TX = torch.cat((self.q_norm.over(q_TX, self.tp), self.k_norm.over(k_TX, self.tp), v_TX), dim=-1)
        if spec.qk_norm_apart:
            qkv_TX = self._normed_apart(qkv_TX)
        if spec.growth is not None:
            q_TX, kv_TX = qkv_TX.tensor_split((spec.q_size,), dim=-1)
            qkv_TX = torch.cat((grown(q_TX, positions_T, spec.growth), kv_TX), dim=-1)
        if spec.qk_norm_behind:
            qkv_TX = self._normed_behind(qkv_TX, positions_T)
        if spec.value_dim is not None:
            qkv_TX = self._filled_up(qkv_TX, spec.value_dim)
        if gate_TX is None and gate_TH is None and spec.value_dim is None:
            return self.out(state.attend(qkv_TX, positions_T, self.heads, self.out.buffer(len(qkv_TX))))
        attended_TX = state.attend(qkv_TX, positions_T, self.heads)
        assert isinstance(attended_TX, Tensor)  # without room nothing is rounded
        if gate_TX is not None:
            attended_TX = self.ops.output_gate(attended_TX, gate_TX)
        if gate_TH is not None:
            attended_TX = self.ops.output_gate(attended_TX, gate_TH.repeat_interleave(spec.head_dim, dim=-1))
        if spec.value_dim is not None:
            attended_TX = attended_TX.unflatten(-1, (spec.num_heads, -1))[..., : spec.value_dim].flatten(1)
        return self.out(attended_TX)

    def _filled_up(self, qkv_TX: Tensor, value_dim: int) -> Tensor:
        """Return the projection with values as wide as keys."""
        spec = self.spec
        qk_TX, v_TX = qkv_TX.tensor_split((spec.q_size + spec.kv_size,), dim=-1)
        v_TGD = F.pad(v_TX.unflatten(-1, (spec.num_kv_heads, -1)), (0, spec.head_dim - value_dim))
        return torch.cat((qk_TX, v_TGD.flatten(1)), dim=-1)

    def _normed_behind(self, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Return the projection with queries and keys that were rotated and then normalised, head by head."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        spec = self.spec
        q_THD, k_TGD, v_TGD = split_heads(qkv_TX, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if self.rotary is not None:
            q_THD, k_TGD = self.ops.rope(q_THD, k_TGD, self.rotary.cos_sin_ZY, positions_T)
        q_THD, k_TGD = self.q_norm(q_THD)[0], self.k_norm(k_TGD)[0]
        return torch.cat((q_THD.flatten(1), k_TGD.flatten(1), v_TGD.flatten(1)), dim=-1)

    def _normed_apart(self, qkv_TX: Tensor) -> Tensor:
        """Return the projection with queries and keys that were normalised head by head, with weights of each."""
        assert self.head_norm is not None
        spec = self.spec
        *heads, v_TGD = split_heads(qkv_TX, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        found = []
        for norm, x_THD in zip((self.q_norm, self.k_norm), heads, strict=True):
            assert norm is not None
            assert norm.bias is not None
            found.append(self.head_norm(x_THD)[0].flatten(1) * norm.weight + norm.bias)
        return torch.cat((*found, v_TGD.flatten(1)), dim=-1)

    def _slopes(self) -> Tensor:
        heads = self.spec.num_heads
        return alibi_slopes(heads * self.tp.size)[heads * self.tp.rank :][:heads]

    @property
    def heads(self) -> Heads:
        """The steps between the projection and the attention that are still to be done with the heads: norms, rotation,
        and the treatment of scores."""
        angles, spec = None if self.rotary is None else self.rotary.cos_sin_ZY, self.spec
        [bias] = self._bias
        bias_HL = None if bias is None else bias.by_distance()
        causal_HL = None if bias_HL is None or spec.bidirectional else bias_HL.float()
        softmax = Softmax(spec.scale, spec.softcap, self.sinks, self.slopes_H, spec.window, causal_HL)
        kept = softmax, self.kv_scales, self.saturated_1
        if self.grid_rows is not None and self.grid_columns is not None:
            assert self.qkv.bias is not None
            grid = GridVectors(self.grid_rows, self.grid_columns, self.qkv.bias)
            return Heads(self.spec, self.ops, None, None, 0.0, None, *kept, grid=grid)
        if spec.disentangled is not None:
            return Heads(self.spec, self.ops, None, None, 0.0, None, *kept, distances=self._projected_distances())
        if spec.qk_norm_behind:  # which are done by then, as the rotation is
            return Heads(self.spec, self.ops, None, None, 0.0, None, *kept, bias_HL=bias_HL)
        if self.q_norm is None or spec.qk_norm_whole or spec.qk_norm_apart:
            return Heads(self.spec, self.ops, None, None, 0.0, angles, *kept, bias_HL=bias_HL)
        norms = self.q_norm.weight, None if self.k_norm is None else self.k_norm.weight, self.q_norm.eps
        return Heads(self.spec, self.ops, *norms, angles, *kept, bias_HL=bias_HL)

    def _projected_distances(self) -> Distances:
        """Return the vectors of distances as this layer's queries and keys."""
        [vectors], spec = self._distances, self.spec
        assert vectors is not None
        q_SHD, k_SHD, _ = split_heads(self.qkv(vectors.normed()), spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return Distances(q_SHD, k_SHD, vectors.index_L)


class Attention(AttentionBehind):
    """Causal grouped-query attention with its projection. inputs: what it reads is so wide (default: as the model)."""

    def __init__(self, spec: AttentionSpec, width: int, build: Build, inputs: int | None = None) -> None:
        inner = build.within("qkv")
        qkv = Linear(inputs or width, spec.projected, spec.qkv_bias, inner, pending=build.pending)
        super().__init__(spec, width, build, projection=qkv)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: Attends
    ) -> tuple[Tensor, Tensor]:
        """Return (what attention adds to the residual, the residual before it): [T, M] each."""
        qkv_TX, residual_TM = self.qkv.normed(norm, x_TM, residual_TM)
        return self.mixed(qkv_TX, positions_T, state), residual_TM

    def keep(self, x_TM: Tensor, positions_T: Tensor, state: Keeps) -> None:
        """Store the keys and values of vectors that others attend to, and that ask for nothing themselves."""
        state.keep(self.qkv(x_TM), positions_T, self.heads)


class PositionBias(nn.Module):
    """The numbers of a `Relative`, for every distance that two tokens of this run can have. If it is causal, those are
    the distances of earlier keys, of which all from the last one on are alike."""

    bucket_L: Tensor

    def __init__(self, spec: Relative, heads: int, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(spec.buckets, heads)
        ends = (0, -1 - spec.distance, -1) if spec.causal else (1 - build.positions, build.positions)
        distance_L = torch.arange(*ends, device=build.device)
        self.register_buffer("bucket_L", buckets(distance_L, spec), persistent=False)

    def by_distance(self) -> Tensor:
        """Return the bias: [H, L]."""
        return self.weight.T[:, self.bucket_L].contiguous()


class DistanceVectors(nn.Module):
    """The vectors of a `Disentangled`, and the one of every distance that two tokens of this run can have."""

    index_L: Tensor

    def __init__(self, spec: Disentangled, width: int, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(2 * spec.buckets, width)
        self.norm = Norm(NormSpec(kind="layer", eps=spec.eps), width, build)
        distance_L = torch.arange(1 - build.positions, build.positions, device=build.device)
        index_L = (log_buckets(distance_L, spec) + spec.buckets).clamp(0, 2 * spec.buckets - 1)
        self.register_buffer("index_L", index_L, persistent=False)

    def normed(self) -> Tensor:
        """Return the vectors behind their norm: [S, M]."""
        return self.norm(self.weight)[0]


def log_buckets(distance_L: Tensor, spec: Disentangled) -> Tensor:
    """Return distances of queries from keys as they are up to half of the buckets, and beyond that by their logarithm:
    int64 [L]."""
    single, apart_L = spec.buckets // 2, distance_L.abs()
    # In float32, as transformers has it, since some distances lie at the edge of two ranges
    rise_L = torch.log(apart_L.clamp(min=single) / single) / torch.log(torch.tensor((spec.distance - 1) / single))
    far_L = (torch.ceil(rise_L * (single - 1)).long() + single) * distance_L.sign()
    return torch.where(apart_L <= single, distance_L, far_L)


def buckets(distance_L: Tensor, spec: Relative) -> Tensor:
    """Return the range of each distance of a key from its query, int64 [L]."""
    if spec.single:
        return distance_L.clamp(-spec.distance, spec.distance - 1) + spec.distance
    behind = spec.buckets if spec.causal else spec.buckets // 2
    single = behind // 2
    apart_L = distance_L.abs()
    # In float32, as transformers has it, since some distances lie at the edge of two ranges
    far_L = torch.log(apart_L.float() / single) / math.log(spec.distance / single) * (behind - single)
    range_L = torch.where(apart_L < single, apart_L, (single + far_L.clamp(min=0).long()).clamp(max=behind - 1))
    return range_L + behind * (distance_L > 0)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slopes of the heads, float32 [H]. For n heads, n a power of two, they are powers of 2^(-8/n). Heads
    beyond the largest power of two get every other power of the next n's (Press et al., arXiv 2108.12409)."""
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32)
