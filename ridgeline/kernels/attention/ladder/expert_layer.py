"""A decoder layer that chooses twice: the blocks of keys that a query reads, and the experts that a token goes to.

Attention is causal over all keys (None), MoBA or native sparse attention. If it may read all blocks, the layer is that
with dense attention: MoBA always, native sparse attention with its gates at (0, 1, 0). Behind it come a router and
gated experts, by the engine's ops. The layer has no gradients, as these have none, and no positions.

`parts` counts what each piece costs at least, so that a table can show what choosing takes beside what it saves.

Legend:
    B  sequences    T  tokens              M  model width       D  head width
    H  query heads  G  heads of keys       L  tokens of a compressed key
    E  experts      F  an expert's inner width
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from ridgeline.kernels.attention.triton_moba import Moba, moba_attention
from ridgeline.kernels.attention.triton_nsa import KeysValues, Nsa, compress, nsa_attention
from ridgeline.kernels.attention.triton_sdpa import sdpa
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.routing import RoutingSpec
from ridgeline.kernels.cuda.predict import Chip
from ridgeline.kernels.gemm.experts.op import GROUPED_DOWN, GROUPED_GATE_UP
from ridgeline.kernels.gemm.route.op import ROUTE, Router
from ridgeline.kernels.small.norm.op import RMS_NORM

EPS = 1e-6
Sparse = Moba | Nsa | None


@dataclass(frozen=True)
class ExpertShape:
    """Widths of a layer: those of Qwen3-30B-A3B by default. chosen: experts of a token."""

    model: int = 2048
    heads: int = 32
    groups: int = 4
    size: int = 128
    experts: int = 128
    chosen: int = 8
    inner: int = 768


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer.

    q_XM: queries, [H D, M]. kv_XM: keys and values, [2 G D, M], for native sparse attention thrice as many: those of
        compressed keys, of chosen blocks and of the window, one behind the other.
    compress_LD: the weights of a compressed key's tokens, and gates_YM, gates_Y the gates of the three answers, [3 H,
        M] and [3 H]: for native sparse attention alone.
    """

    norm_M: Tensor
    q_XM: Tensor
    kv_XM: Tensor
    o_MX: Tensor
    expert_norm_M: Tensor
    router_EM: Tensor
    gate_up_EGM: Tensor
    down_EMF: Tensor
    compress_LD: Tensor | None = None
    gates_YM: Tensor | None = None
    gates_Y: Tensor | None = None

    def to(self, *given: torch.dtype | torch.device | str) -> ExpertWeights:
        """Return the weights in another dtype or on another device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            moved[field.name] = None if tensor is None else tensor.to(*given)
        return ExpertWeights(**moved)


def drawn_weights(shape: ExpertShape, sparse: Sparse) -> ExpertWeights:
    """Return random weights in float64, each row of about unit length."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64) / sizes[-1] ** 0.5

    s, three = shape, isinstance(sparse, Nsa)
    norms = [1 + 0.1 * torch.randn(s.model, dtype=torch.float64) for _ in range(2)]
    return ExpertWeights(
        norms[0], draw(s.heads * s.size, s.model), draw((6 if three else 2) * s.groups * s.size, s.model),
        draw(s.model, s.heads * s.size), norms[1], draw(s.experts, s.model) * 3,
        draw(s.experts, 2 * s.inner, s.model), draw(s.experts, s.model, s.inner),
        draw(sparse.length, s.size).softmax(0) if isinstance(sparse, Nsa) else None,
        draw(3 * s.heads, s.model) if three else None, torch.zeros(3 * s.heads, dtype=torch.float64) if three else None,
    )  # fmt: skip


class ExpertLayer:
    """The layer with given weights, forward. sparse: how attention chooses; None: it reads all keys."""

    def __init__(self, shape: ExpertShape, weights: ExpertWeights, sparse: Sparse) -> None:
        self.shape, self.weights, self.sparse = shape, weights, sparse
        platform = Platform.of(weights.q_XM.device)
        self.norm, self.route = RMS_NORM.choose(platform), ROUTE.choose(platform)
        self.gate_up, self.down = GROUPED_GATE_UP.choose(platform), GROUPED_DOWN.choose(platform)
        how = RoutingSpec(experts=shape.experts, top_k=shape.chosen, renormalize=True)
        self.router = Router(weights.router_EM, None, None, None, how)

    def __call__(self, x_BTM: Tensor) -> Tensor:
        """Return the layer's output, [B, T, M]."""
        x_TM, (batch, tokens, model) = x_BTM.reshape(-1, x_BTM.shape[-1]), x_BTM.shape
        n_TM, _ = self.norm(x_TM, None, self.weights.norm_M, EPS)
        out_BHTD = self.attend(n_TM.view(batch, tokens, model))
        added_TM = linear(out_BHTD.transpose(1, 2).reshape(batch * tokens, -1), self.weights.o_MX)
        n_TM, s_TM, routes = self.route(
            added_TM, x_TM, self.weights.expert_norm_M, EPS, self.router, None, None
        )  # fmt: skip
        h_PF = self.gate_up(n_TM, self.weights.gate_up_EGM, None, routes, "silu")
        return self.down(h_PF, self.weights.down_EMF, None, routes, s_TM).view(batch, tokens, model)

    def attend(self, n_BTM: Tensor) -> Tensor:
        """Return the attention of normalized inputs, [B, H, T, D]."""
        q_BHTD = self._heads(n_BTM, self.weights.q_XM)
        parts = self._heads(n_BTM, self.weights.kv_XM).split(self.shape.groups, 1)
        if isinstance(self.sparse, Nsa):
            weights = self.weights
            assert weights.compress_LD is not None
            assert weights.gates_YM is not None
            pairs = [KeysValues(*parts[i : i + 2]) for i in (0, 2, 4)]
            coarse = KeysValues(*(compress(x, weights.compress_LD, self.sparse) for x in pairs[0]))
            gates = linear(n_BTM, weights.gates_YM, weights.gates_Y).sigmoid()
            gates_BHT3 = gates.unflatten(-1, (self.shape.heads, 3)).transpose(1, 2)
            return nsa_attention(q_BHTD, coarse, pairs[1], pairs[2], gates_BHT3, self.sparse)
        if isinstance(self.sparse, Moba):
            return moba_attention(q_BHTD, parts[0], parts[1], self.sparse)
        return sdpa(q_BHTD, parts[0], parts[1])

    def _heads(self, n_BTM: Tensor, weight_XM: Tensor) -> Tensor:
        return linear(n_BTM, weight_XM).unflatten(-1, (-1, self.shape.size)).transpose(1, 2)


def dense_layer(shape: ExpertShape, weights: ExpertWeights, x_BTM: Tensor) -> Tensor:
    """Return the layer with dense attention from its definition, a token and an expert at a time, in the inputs' dtype.
    Of three keys and values those of chosen blocks are taken."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    n_BTM = norm(x_BTM, weights.norm_M)
    q, kv = (linear(n_BTM, w).unflatten(-1, (-1, shape.size)).transpose(1, 2) for w in (weights.q_XM, weights.kv_XM))
    k, v = kv.split(shape.groups, 1)[2 if len(weights.kv_XM) > 2 * shape.groups * shape.size else 0 :][:2]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x_TM = (x_BTM + linear(out.transpose(1, 2).flatten(2), weights.o_MX)).flatten(0, 1)
    rows = []
    for x_M in x_TM:
        n_M = norm(x_M, weights.expert_norm_M)
        best = (weights.router_EM @ n_M).softmax(0).topk(shape.chosen)
        for share, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
            gate, up = (weights.gate_up_EGM[expert] @ n_M).chunk(2)
            x_M = x_M + share * (weights.down_EMF[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(x_M)
    return torch.stack(rows).view(x_BTM.shape)


# ---- what it costs --------------------------------------------------------------------------------------------------


def keys_read(sparse: Sparse, tokens: int) -> float:
    """Return the number of keys that all queries of one head read, the compressed ones too. For MoBA it is exact."""
    own, t = torch.arange(tokens), torch.arange(tokens) + 1
    if isinstance(sparse, Moba):
        own = own // sparse.block
        return float((t - own * sparse.block + own.clamp(max=sparse.top - 1) * sparse.block).sum())
    if isinstance(sparse, Nsa):
        chosen, near = t.clamp(max=sparse.selected * sparse.block), t.clamp(max=sparse.window)
        return float((_coarse(sparse, tokens) + chosen + near).sum())
    return tokens * (tokens + 1) / 2


def _coarse(nsa: Nsa, tokens: int) -> Tensor:
    """Return the compressed keys that each query reads."""
    return ((torch.arange(tokens) + 1 - nsa.length) // nsa.stride + 1).clamp(min=0)


def parts(shape: ExpertShape, sparse: Sparse, tokens: int, chip: Chip) -> dict[str, float]:
    """Return the least seconds of each part of a layer: FLOPs, or exponentials of scores that are computed again.

    blocks: the choice of blocks. MoBA scores the means of past blocks; native sparse attention computes the compressed
        scores once more. router: its product and the order of tokens: scores and places, written and read.
    """
    s, coarse = shape, float(_coarse(sparse, tokens).sum()) if isinstance(sparse, Nsa) else 0.0
    three, cycles = isinstance(sparse, Nsa), chip.multiprocessors * chip.clock
    outputs = (2 * s.heads + (6 if three else 2) * s.groups) * s.size + (3 * s.heads if three else 0)
    blocks = 2 * s.size * s.heads * coarse / chip.matrix
    if isinstance(sparse, Moba):
        blocks = 2 * s.size * s.heads * float((torch.arange(tokens) // sparse.block).sum()) / chip.matrix
    order = tokens * (8 * s.experts + 24 * s.chosen) / chip.bandwidth
    return {
        "projections": 2 * tokens * s.model * outputs / chip.matrix,
        "attention": 4 * s.size * s.heads * keys_read(sparse, tokens) / chip.matrix,
        "blocks": max(blocks, s.heads * coarse / chip.exponentials / cycles),
        "router": 2 * tokens * s.model * s.experts / chip.matrix + order,
        "experts": 6 * tokens * s.chosen * s.model * s.inner / chip.matrix,
    }


def table(chip: Chip, lengths: tuple[int, ...] = (16_384, 65_536)) -> list[str]:
    """Return the lines of the page's table, in milliseconds."""
    shape, ways = ExpertShape(), {"all keys": None, "MoBA": Moba(), "NSA": Nsa()}
    names = list(parts(shape, None, 1, chip))
    lines = [
        f"| tokens | attention to | {' | '.join(names)} | all | choosing |",
        "|--:|---|" + "--:|" * (len(names) + 2),
    ]
    for tokens in lengths:
        for way, sparse in ways.items():
            found = parts(shape, sparse, tokens, chip)
            total, choosing = sum(found.values()), found["blocks"] + found["router"]
            cells = " | ".join(f"{1e3 * x:.3f}" for x in (*found.values(), total))
            lines.append(f"| {tokens:,} | {way} | {cells} | {100 * choosing / total:.1f} % |")
    return lines
