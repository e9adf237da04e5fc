"""The projector whose learned queries attend to a view's patches, and to a prompt's text: the Q-Former of BLIP-2 and
InstructBLIP.

Legend:
    T  patches of all views, with their class tokens; queries of all views
    V  views
    H  heads
    Q  queries, or patches, of a view
    W  width of the tower
    X  columns of a projection
    Y  width of a head
    N  tokens of texts, of all views
    B  queries and tokens of all views, view by view
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.model import ABSENT, AttentionSpec
from ridgeline.core.specs.queries import QueriesSpec
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.layers.build import Build
from ridgeline.layers.cross_attention import CrossAttention
from ridgeline.layers.encoder.packed import PackedViews
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class PatchKeys:
    """The keys and values that one layer makes of the patches of views, an `AttendsAcross`."""

    seen_T1 = None

    def __init__(self, views: int) -> None:
        self._views = views

    def write(self, kv_TX: Tensor, spec: AttentionSpec) -> None:
        """Keep the keys and values of all views, of which each has as many patches."""
        k_TX, v_TX = kv_TX.split((spec.kv_size, spec.kv_size), dim=1)
        self._width = spec.head_dim
        self._k_VHQY, self._v_VHQY = self._by_view(k_TX), self._by_view(v_TX)

    def attend(self, q_TX: Tensor, softmax: Softmax) -> Tensor:
        """Attend with each view's queries to all of its patches: [T, H * D]."""
        q_VHQY = self._by_view(q_TX)
        out_VHQY = F.scaled_dot_product_attention(q_VHQY, self._k_VHQY, self._v_VHQY, scale=softmax.scale)
        return out_VHQY.transpose(1, 2).reshape(q_TX.shape)

    def _by_view(self, x_TX: Tensor) -> Tensor:
        heads = x_TX.shape[1] // self._width
        return x_TX.reshape(self._views, -1, heads, self._width).transpose(1, 2)


class QueryProjector(nn.Module):
    """The map of a `QueriesSpec`."""

    def __init__(self, spec: QueriesSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.ops, width = spec, build.ops, spec.query_width
        self.queries = build.parameter(spec.queries, width)
        self.query_norm = Norm(spec.query_norm, width, build)
        self.layers = nn.ModuleList(
            Layer(layer, width, build.within(f"layers.{n}")) for n, layer in enumerate(spec.query_layers)
        )
        self.words = build.parameter(spec.words, width) if spec.words else None
        self.places = build.parameter(spec.places, width) if spec.words else None
        self.word_layers = nn.ModuleList(
            Layer(layer, width, build.within(f"word_layers.{n}")) for n, layer in enumerate(spec.word_layers)
        )
        self.down = Linear(width, (spec.outputs,), spec.bias, build.within("down"))

    def forward(self, x_TW: Tensor, views: int, texts: Sequence[Sequence[int]] = ()) -> Tensor:
        """Return the vectors of so many views of equally many patches: [L, M]. texts: the tokens of the prompt of each
        view, if the spec has words."""
        q_TW = self.query_norm(self.queries)[0].repeat(views, 1)
        w_NW = self._embedded(texts, x_TW.device) if self.spec.words and any(texts) else q_TW[:0]
        order_B, counts = self._together(views, texts, x_TW.device)
        back_B = order_B.argsort()
        among = PackedViews(self.ops, PackedRows.of(counts))
        places_B = torch.arange(len(order_B), device=x_TW.device)
        for index, (spec, layer) in enumerate(zip(self.spec.query_layers, self.layers, strict=True)):
            if isinstance(layer.mixer, CrossAttention):
                keys = PatchKeys(views)
                layer.mixer.encode(x_TW, keys)
                q_TW, _ = layer(q_TW, None, places_B[: len(q_TW)], keys, None)
            elif spec.mixer is ABSENT:
                q_TW, _ = layer(q_TW, None, places_B[: len(q_TW)], None, None)
            else:
                x_BW, _ = layer(torch.cat((q_TW, w_NW))[order_B], None, places_B, among, None)
                q_TW, w_NW = x_BW[back_B].split((len(q_TW), len(w_NW)))
            if len(w_NW) and index % 2:
                w_NW, _ = self.word_layers[index // 2](w_NW, None, places_B[: len(w_NW)], None, None)
        found_LM: Tensor = self.down(q_TW)
        return found_LM

    def _embedded(self, texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Return the tokens of all views' texts, behind the norm: [N, W]."""
        assert self.words is not None
        assert self.places is not None
        ids, places = (np.concatenate([np.asarray(each, np.int64) for each in x]) for x in (texts, map(_count, texts)))
        ids_N, places_N = (torch.from_numpy(each).to(device) for each in (ids, places))
        return self.query_norm(self.words[ids_N] + self.places[places_N])[0]

    def _together(self, views: int, texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, np.ndarray]:
        """Return the order in which each view's text follows its queries, and the numbers of both together."""
        queries, lengths = self.spec.queries, [len(each) for each in texts] or [0] * views
        first = views * queries + np.cumsum([0, *lengths])
        order = [
            np.concatenate((np.arange(queries) + queries * view, np.arange(first[view], first[view + 1])))
            for view in range(views)
        ]
        return torch.from_numpy(np.concatenate(order)).to(device), queries + np.array(lengths)


def _count(text: Sequence[int]) -> np.ndarray:
    return np.arange(len(text))
