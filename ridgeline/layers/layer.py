"""A layer: a mixer and a feed-forward, each added to the residual.

Legend:
    T  tokens of all sequences of a step in a row
    M  model width
    P  width of a layer's own input
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ridgeline.core.specs.model import ABSENT, CrossAttentionSpec, LayerSpec
from ridgeline.layers import kinds
from ridgeline.layers.build import Build
from ridgeline.layers.layer_inputs import LayerInput
from ridgeline.layers.norm import Norm
from ridgeline.parallel.axis import ALONE, Deferred


class Layer(nn.Module):
    """A mixer and a feed-forward. The norm before each part, and the residual addition, happen inside its first
    product."""

    def __init__(self, spec: LayerSpec, width: int, build: Build) -> None:
        super().__init__()
        leaves = leaves_sums(spec)
        inner = build.sums if leaves and not spec.parallel else ALONE
        build = replace(build, sums=Deferred(build.mesh.tp) if leaves else build.mesh.tp)
        before, after = spec.norms in ("before", "both"), spec.norms in ("after", "both", "around")
        mixes, feeds = spec.mixer is not ABSENT, spec.feed_forward is not ABSENT
        self.spec = spec
        self.mixer_norm = Norm(spec.norm, width, build) if before and mixes else None
        self.mixer = kinds.mixer(spec.mixer, width, build.within("mixer")) if mixes else None
        self.mixer_post_norm = Norm(spec.norm, width, build) if after and mixes else None
        fed = before or spec.norms == "feed_forward"
        own = None if spec.one_norm else Norm(spec.norm, width, build)
        self.feed_forward_norm = (own or self.mixer_norm) if fed and feeds else None
        inside = replace(build.within("feed_forward"), pending=inner if mixes else build.pending)
        self.feed_forward = kinds.feed_forward(spec.feed_forward, width, inside) if feeds else None
        self.feed_forward_post_norm = Norm(spec.norm, width, build) if after and feeds else None
        self.layer_input = None
        if spec.inputs is not None:
            self.layer_input = LayerInput(spec.inputs, spec.norm, width, build.within("layer_input"))
        self.mixer_scale = build.parameter(width) if spec.scaled and mixes else None
        self.feed_forward_scale = build.parameter(width) if spec.scaled and feeds else None
        self.mixer_gate = build.parameter(1) if spec.gated and mixes else None
        self.feed_forward_gate = build.parameter(1) if spec.gated and feeds else None
        self._passes = isinstance(spec.mixer, CrossAttentionSpec) and spec.mixer.pictures > 0
        self.scalar = build.parameter(1) if spec.scalar else None
        if self.scalar is not None:
            self.scalar.requires_grad_(False)  # a constant of the checkpoint, which transformers does not train either

    def forward(
        self,
        x_TM: Tensor,
        residual_TM: Tensor | None,
        positions_T: Tensor,
        state: Any,
        live_T: Tensor | None,
        embedded_TM: Tensor | None = None,
        input_TP: Tensor | None = None,
        sums: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (what this layer adds to the residual, the residual before it), or (the residual after it, None).

        embedded_TM: the input of the first layer, for layers whose spec asks for it.
        input_TP: the layer's own input, if it has one.
        sums: gets x_TM + residual_TM, of a layer that `sums_first`.
        """
        if self.mixer is not None:
            also = (embedded_TM,) if self.spec.embedded else ()
            x_TM, residual_TM = self.mixer(self.mixer_norm, x_TM, residual_TM, positions_T, state, *also)
            if sums is not None:
                assert residual_TM is not None
                sums.append(residual_TM)
            x_TM, residual_TM = self._added(x_TM, residual_TM, self.mixer_post_norm, self.mixer_scale, self.mixer_gate)
        if self.feed_forward is None:
            pass
        elif self.spec.parallel:
            y_TM, _ = self.feed_forward(self.feed_forward_norm, residual_TM, None, live_T)
            y_TM, _ = self._added(y_TM, None, self.feed_forward_post_norm, self.feed_forward_scale)
            x_TM = x_TM + y_TM
        else:
            x_TM, residual_TM = self.feed_forward(self.feed_forward_norm, x_TM, residual_TM, live_T)
            if self._passes:
                x_TM = x_TM.masked_fill(~state.seen_T1, 0)
            own = self.feed_forward_post_norm, self.feed_forward_scale, self.feed_forward_gate
            x_TM, residual_TM = self._added(x_TM, residual_TM, *own)
        if self.layer_input is not None and input_TP is not None:
            x_TM, residual_TM = x_TM if residual_TM is None else x_TM + residual_TM, None
            x_TM = x_TM + self.layer_input(x_TM, input_TP)
        if self.scalar is None:
            return x_TM, residual_TM
        return (x_TM if residual_TM is None else x_TM + residual_TM) * self.scalar, None

    @property
    def sums_first(self) -> bool:
        """True if the first thing that the layer does is to add what comes to its residual, in a norm."""
        return self.mixer is not None and self.mixer_norm is not None

    def _added(
        self,
        x_TM: Tensor,
        residual_TM: Tensor | None,
        norm: Norm | None,
        scale_M: Tensor | None,
        gate_1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the addend of a part with the output `x_TM`, and the residual; or the residual after the addition,
        and None."""
        multiplier = self.spec.residual_multiplier
        if self.spec.norms == "around" and norm is not None:
            return norm(x_TM if multiplier == 1 else x_TM * multiplier, residual_TM)[0], None
        if norm is not None:
            x_TM, _ = norm(x_TM)
        if scale_M is not None:
            x_TM = x_TM * scale_M
        if gate_1 is not None:
            x_TM = x_TM * gate_1.tanh()
        return x_TM if multiplier == 1 else x_TM * multiplier, residual_TM


def leaves_sums(spec: LayerSpec) -> bool:
    """Return True if the parts of a divided layer leave their sums over ranks to the norm behind them, with which these
    are made at once. A norm of a part's own output needs the sum before."""
    late = spec.late_addend or getattr(spec.feed_forward, "late", False)
    return spec.norms == "before" and not (spec.scalar or spec.scaled or spec.gated or spec.inputs or late)


def divides_tokens(spec: LayerSpec) -> bool:
    """Return True if nothing but a norm behind a sum looks at a divided layer's residual, so that ranks may each hold
    that of a part of the tokens."""
    return leaves_sums(spec) and not (spec.parallel or spec.embedded) and spec.norm.kind == "rms"
