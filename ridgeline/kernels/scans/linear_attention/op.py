"""Linear attention whose state decays, over rows of unlike lengths.

A state maps keys to values. Each token lets the state decay, and then adds its own key and value. The decay is a number
of each token and key channel (gated linear attention), of each token and head, or of each head (retention).

Yang, Wang, Shen, Panda and Kim, "Gated Linear Attention Transformers", arXiv 2312.06635; Sun et al., "Retentive
Network", arXiv 2307.08621.

Legend:
    H  heads
    K  width of a query or key
    N  block ids
    R  rows
    T  tokens of the step
    V  width of a value
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.scans.metadata import Inputs, ScanMetadata
from ridgeline.kernels.scans.recurrence import decaying, recurrence


@dataclass(frozen=True)
class LinearInputs(Inputs):
    """q_THK, k_THK, v_THV: the numbers of a head, and the heads of a token, must lie side by side. decay: the logarithm
    of what is left of the state, finite and at most 0: [T, H, K], [T, H] or [H]."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay: Tensor
    scale: float
    of_tokens = ("q_THK", "k_THK", "v_THV", "decay")

    @property
    def by_token(self) -> dict[str, Tensor]:
        """Decays of heads alone are no token's."""
        return {name: x_T for name, x_T in super().by_token.items() if x_T.dim() > 1}


def linear_attention(given: LinearInputs, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return o_THV, dense and of v's dtype, and replace the rows' states. Each token does

        S ← exp(decay) · S + k ⊗ v;    o = Sᵀ q · scale

    states_NHKV: float32. It may be strided by block id.
    """
    left_THK = by_channel(given.decay, given.k_THK).double().exp()
    rule = decaying(given.q_THK.double(), given.k_THK.double(), given.v_THV.double(), left_THK, given.scale)
    return recurrence(rule, states_NHKV, metadata, given.v_THV)


def by_channel(decay: Tensor, k_THK: Tensor) -> Tensor:
    """Return the decay of each token, head and channel, as a view."""
    if decay.dim() == 1:
        decay = decay.expand(len(k_THK), -1)
    return (decay if decay.dim() == 3 else decay[:, :, None]).expand_as(k_THK)


LINEAR_ATTENTION = Op(
    "linear_attention",
    linear_attention,
    (
        Implementation("triton", "ridgeline.kernels.scans.linear_attention.triton:linear_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.scans.linear_attention.torch_ops:linear_attention"),
        Implementation(
            "batch_invariant", "ridgeline.kernels.scans.linear_attention.triton:linear_attention_in_order", on_gpu
        ),
        Implementation(
            "triton_training", "ridgeline.kernels.scans.linear_attention.triton_training:linear_attention", on_gpu
        ),
    ),
    matrix=True,
)
