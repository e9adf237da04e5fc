"""The objective of training, the mean negative log-likelihood of the next token, and its cost.

Legend:
    B  sequences
    S  tokens per sequence
    N  positions scored, B * S
    C  tokens per chunk
    M  model width
    V  vocabulary
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ridgeline.core.specs.model import AttentionSpec, ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.op import Platform, on_gpu
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.layers.dense import dense_states
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.parts import MIXERS
from ridgeline.perf.precision import precision
from ridgeline.training.cross_entropy import cross_entropy_sum

# Plain torch, because most of our fast kernels are made for inference and have no backward pass.
_TRAINING_OPS = dict.fromkeys(OPS, "reference") | dict.fromkeys(
    (
        *("linear", "norm_linear", "embedding", "activation", "gated_activation", "grouped_gate_up", "grouped_down"),
        *("linear_attention", "delta_attention", "ssd", "wkv", "causal_conv", "gated_norm"),
    ),
    "torch",
)


def training_ops(platform: Platform) -> dict[str, str]:
    """Return the implementation of every op that training takes. Each has a gradient."""
    return _TRAINING_OPS | ({"linear_attention": "triton_training"} if on_gpu(platform) else {})


def training_decoder(spec: ModelSpec, dtype: torch.dtype, device: torch.device, mesh: Mesh | None = None) -> Decoder:
    """Return a decoder, or a rank's part of it, with uninitialised parameters whose every op has a gradient."""
    platform = Platform.of(device)
    return Decoder(spec, Ops(platform, overrides=training_ops(platform)), dtype=dtype, device=device, mesh=mesh)


class NextTokenLoss(nn.Module):
    """The mean nats per token. Products run in `autocast`, if it is given; weights, residual stream and loss stay
    float32.

    Logits are made `chunk` tokens at a time, with their gradients, so [N, V] never exists and nothing is made twice.
    """

    def __init__(self, decoder: Decoder, *, batch_size: int, chunk: int, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.batch_size = batch_size
        self.chunk = chunk
        self.autocast = autocast

    def forward(self, tokens_BS1: Tensor) -> Tensor:
        """Return the loss of tokens_BS1, which holds S + 1 tokens per sequence: the inputs and, one later, the
        targets."""
        return self.mean(self.hidden(tokens_BS1), tokens_BS1)

    def hidden(self, tokens_BS1: Tensor, before_NM: Tensor | None = None) -> Hidden:
        """Return the layers' output for the inputs. before_NM: what the stage before has handed on, if the decoder is a
        later stage."""
        inputs_BS = tokens_BS1[:, :-1]
        batch, length = inputs_BS.shape
        dtype, device = self.decoder.dtype, tokens_BS1.device
        positions_N = torch.arange(length, device=device).repeat(batch)
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            states = dense_states(self.decoder.spec, self.batch_size, length, dtype, device)
            hidden: Hidden = self.decoder(inputs_BS.flatten(), positions_N, states, before_NM)
        return hidden

    def mean(self, hidden: Hidden, tokens_BS1: Tensor) -> Tensor:
        """Return the loss of the layers' output."""
        targets_N, decoder = tokens_BS1[:, 1:].flatten(), self.decoder
        head = [each for each in decoder.unembed.parameters() if each.requires_grad]
        with torch.autocast(tokens_BS1.device.type, self.autocast, enabled=self.autocast is not None):
            x_NM, matrix_VM = decoder.normed(hidden), decoder.scoring_matrix
            total = cross_entropy_sum(x_NM, targets_N, decoder.scored, head, self.chunk, matrix_VM)
        return total / len(targets_N)


def training_flops_per_token(spec: ModelSpec, length: int) -> float:
    """Return the FLOPs of the forward and backward pass (three times the forward) at context `length`.

    They count matrix products and the causal half of attention. Recomputation, norms and activations do not count.
    """
    products, mixing = layer_flops(spec, length)
    return 3 * (2.0 * spec.vocab_size * spec.hidden_size + products + mixing)


def layer_flops(spec: ModelSpec, length: int) -> tuple[float, float]:
    """Return the FLOPs of one token's forward pass through the layers, at context `length`: of products with weights,
    and of mixing tokens."""
    products = mixing = 0.0
    for layer in spec.layers:
        products += 2 * sum(p.used * p.inputs * p.outputs for p in layer.products(spec.hidden_size).values())
        if isinstance(layer.mixer, AttentionSpec):
            mixing += 4 * layer.mixer.q_size * min(length, layer.mixer.window or length) / 2
            continue
        shape = StepShape([length], [length], 0)
        ops = MIXERS[layer.mixer.kind](layer.mixer, shape, length, precision("float32"), None)
        mixing += sum(cost.flops for _, cost in ops) / length
    return products, mixing


def needed_flops(spec: ModelSpec, lengths: Sequence[int], scored: int, *, thin: int | None = None) -> float:
    """Return the FLOPs of the forward and backward pass of examples of these lengths, none of which is done again.

    scored: the tokens whose logits are made. thin: the numbers of an adapter, where weights do not learn and so have no
    gradients of their own. None: all weights learn.
    """
    passes = 3 if thin is None else 2
    total = passes * 2.0 * spec.vocab_size * spec.hidden_size * scored + 6.0 * (thin or 0) * sum(lengths)
    for length, count in Counter(lengths).items():
        products, mixing = layer_flops(spec, length)
        total += count * length * (passes * products + 3 * mixing)
    return total


def active_parameters(spec: ModelSpec) -> int:
    """Return the parameters of products that one token computes with: those of its experts alone, where a layer has
    more."""
    used = sum(
        p.used * p.inputs * p.outputs for layer in spec.layers for p in layer.products(spec.hidden_size).values()
    )
    return used + spec.vocab_size * spec.hidden_size
