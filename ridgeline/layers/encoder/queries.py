"""The projector whose learned queries attend to a view's patches: BLIP-2's Q-Former.

Legend:
    T  patches of all views, with their class tokens; queries of all views
    V  views
    H  heads
    Q  queries, or patches, of a view
    W  width of the tower
    X  columns of a projection
    Y  width of a head
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.model import AttentionSpec
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
        self.down = Linear(width, (spec.outputs,), spec.bias, build.within("down"))

    def forward(self, x_TW: Tensor, views: int) -> Tensor:
        """Return the vectors of so many views of equally many patches: [L, M]."""
        x = self.query_norm(self.queries)[0].repeat(views, 1)
        among = PackedViews(self.ops, PackedRows.of(np.full(views, self.spec.queries)))
        positions_T = torch.arange(len(x), device=x.device)
        for layer in self.layers:
            state: PackedViews | PatchKeys = among
            if isinstance(layer.mixer, CrossAttention):
                state = PatchKeys(views)
                layer.mixer.encode(x_TW, state)
            x, _ = layer(x, None, positions_T, state, None)
        found_LM: Tensor = self.down(x)
        return found_LM
