"""What happens to the heads of an attention layer between its fused projection and the attention itself.

Legend:
    T  tokens
    H  query heads
    G  key/value heads
    D  head width
    P  positions
    R  rotated width
    X  (H + 2 G) D, columns of the fused projection
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.core.model_spec import AttentionSpec
from ridgeline.kernels.ops import Ops


@dataclass(frozen=True)
class Heads:
    """Queries and keys are normalised head by head where there are weights for it, then rotated where there is a table
    of angles. slopes_H: float32, what each head's score loses per token of distance; None without ALiBi."""

    spec: AttentionSpec
    ops: Ops
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    cos_sin_PR: Tensor | None
    slopes_H: Tensor | None

    def split(self, qkv_TX: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normalised and rotated: [T, H, D] and [T, G, D] twice. Differentiable."""
        spec, ops = self.spec, self.ops
        parts = qkv_TX.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        q_THD, k_TGD, v_TGD = (part.unflatten(-1, (-1, spec.head_dim)) for part in parts)
        if self.q_norm_D is not None and self.k_norm_D is not None:
            q_THD = ops.rms_norm(q_THD, None, self.q_norm_D, self.eps)[0]
            k_TGD = ops.rms_norm(k_TGD, None, self.k_norm_D, self.eps)[0]
        if self.cos_sin_PR is not None:
            q_THD, k_TGD = ops.rope(q_THD, k_TGD, self.cos_sin_PR, positions_T)
        return q_THD, k_TGD, v_TGD
