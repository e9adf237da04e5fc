"""The policy that reinforcement learning trains: the engine's own decoder, whose numbers are those of rollouts.

Every op runs in the form in which the engine serves it, so a token's log-probability has the bits that the rollout
reported. Its gradient is that of the op in plain torch, at the same inputs.

Legend:
    T  tokens of all sequences
    N  tokens of answers
    R  sequences
    M  model width
    V  vocabulary
    I  inputs of a linear map
    O  outputs of a linear map
    X  columns of the fused projection
    H  query heads
    G  key/value heads
    D  head width
    P  tokens of a cache block
    C  cache blocks of the longest sequence
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.core.specs.model import AttentionSpec, MLPSpec, ModelSpec
from ridgeline.core.specs.state import KVSpec
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.plain.op import in_three
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops, deterministic_ops
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import PackedCausal
from ridgeline.layers.heads import Heads
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.training.objective import training_ops

_WITH_GRADIENT = (
    *("embedding", "rms_norm", "layer_norm", "rope", "gated_activation", "activation", "output_gate", "token_gate"),
)
SCORED_AT_ONCE = 1024  # tokens of answers whose logits exist at once


class _Valued(torch.autograd.Function):
    """Numbers that were computed in one way, with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ServedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, linear: Callable[..., Tensor], x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.biased = bias_O is not None
        return linear(x_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        of_x = grad_TO @ weight_OI if ctx.needs_input_grad[1] else None
        of_weight = grad_TO.T @ x_TI if ctx.needs_input_grad[2] else None
        return None, of_x, of_weight, grad_TO.sum(0) if ctx.biased and ctx.needs_input_grad[3] else None


def valued(graph: Any, value: Any) -> Any:
    """Return the numbers `value`, whose gradient is that of `graph`: tensors, or tuples of them."""
    if isinstance(graph, tuple):
        return tuple(valued(*each) for each in zip(graph, value, strict=True))
    return _Valued.apply(graph, value)


def _both(served: Callable[..., Any], learnt: Callable[..., Any]) -> Callable[..., Any]:
    def op(*given: Any) -> Any:
        if not torch.is_grad_enabled():
            return served(*given)
        with torch.no_grad():
            value = served(*given)
        return valued(learnt(*given), value)

    return op


def policy_ops(platform: Platform) -> Ops:
    """Return ops whose results are those of an engine that is deterministic, and which have gradients."""
    ops, learnt = Ops(platform, deterministic_ops(platform)), Ops(platform, training_ops(platform))
    for name in _WITH_GRADIENT:
        setattr(ops, name, _both(getattr(ops, name), getattr(learnt, name)))
    served = ops.linear

    def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return served(x_TI, weight_OI, bias_O)
        product: Tensor = _ServedProduct.apply(served, x_TI, weight_OI, bias_O)
        return product

    ops.linear = linear
    ops.norm_linear = in_three(ops.rms_norm, linear, ops.gated_activation)
    return ops


class Served(NamedTuple):
    """The rows of a pack as paged attention takes them, and where each token's key goes."""

    batch: RaggedBatch
    place_T: Tensor


class PolicyStates(PackedCausal):
    """The states of all layers for whole sequences, whose keys and values are paged as in an engine."""

    def __init__(self, lengths: Sequence[int], ops: Ops, device: torch.device) -> None:
        super().__init__(lengths)
        self._ops, self._device = ops, device
        self._block = DEFAULT_BLOCK_SIZE[device.type]
        self._served: dict[tuple[int, int, int | None, bool], Served] = {}
        self._caches: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        with torch.no_grad():
            value_TX = self._as_served(qkv_TX.detach(), positions_T, heads)
        if not torch.is_grad_enabled():
            return value_TX
        attended_TX: Tensor = valued(super().attend(qkv_TX, positions_T, heads), value_TX)
        return attended_TX

    def _as_served(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> Tensor:
        spec = heads.spec
        k_NGPD, v_NGPD = self._cache(spec, qkv_TX.dtype)
        served = self._rows(spec, k_NGPD, heads)
        projected = Projected(
            qkv_TX, heads.q_norm_D, heads.k_norm_D, heads.eps, heads.cos_sin_ZY, positions_T, k_NGPD, v_NGPD,
            served.place_T, spec.num_heads, spec.num_kv_heads, spec.v_norm,
        )  # fmt: skip
        q_THD = self._ops.rope_kv(projected)
        return self._ops.paged_attention(q_THD, k_NGPD, v_NGPD, served.batch, heads.softmax, None).flatten(1)

    def _cache(self, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return memory for a layer's keys and values, which the next layer of that form writes over."""
        key = spec.num_kv_heads, spec.head_dim, dtype
        if key not in self._caches:
            by_token = self._device.type == "cpu"  # as in `worker.state.paged`
            inner = (self._block, spec.num_kv_heads) if by_token else (spec.num_kv_heads, self._block)
            blocks = 1 + sum(-(-length // self._block) for length in self.lengths)
            self._caches[key] = torch.zeros(blocks, 2, *inner, spec.head_dim, dtype=dtype, device=self._device)
        units = self._caches[key]
        units = units.transpose(2, 3) if self._device.type == "cpu" else units
        return units[:, 0], units[:, 1]

    def _rows(self, spec: AttentionSpec, k_NGPD: Tensor, heads: Heads) -> Served:
        gains = heads.softmax.slopes_H is not None or heads.softmax.bias_HL is not None
        key = spec.num_heads, spec.num_kv_heads, heads.softmax.window, gains
        if key in self._served:
            return self._served[key]
        lengths_R = np.array(self.lengths, np.int64)
        blocks_R = -(-lengths_R // self._block)
        first_R = 1 + np.cumsum(blocks_R) - blocks_R
        table_RC = np.zeros((len(lengths_R), blocks_R.max()), np.int32)
        for row, (first, count) in enumerate(zip(first_R, blocks_R, strict=True)):
            table_RC[row, :count] = np.arange(first, first + count)
        place_T = np.concatenate([f * self._block + np.arange(n) for f, n in zip(first_R, lengths_R, strict=True)])
        start_R1 = np.concatenate([[0], np.cumsum(lengths_R)]).astype(np.int32)
        rows = np.arange(len(lengths_R), dtype=np.int32), start_R1, lengths_R.astype(np.int32), table_RC
        slots, starts, ends, table = (torch.from_numpy(each).to(self._device) for each in rows)
        shape = AttentionShape(
            num_tokens=int(lengths_R.sum()), tokens_each=0, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads,
            window=heads.softmax.window, cache_NGPD=None if gains or spec.softcap is not None else k_NGPD, alibi=gains,
            head_bytes=spec.head_dim * k_NGPD.element_size(),
        )  # fmt: skip
        batch = RaggedBatch(
            slots_R=slots, block_table_SC=table, start_R1=starts, kv_len_R=ends, tokens_each=0,
            num_tokens_R=lengths_R, kv_bound_R=lengths_R,
            schedule=self._ops.attention_schedule(starts, ends, slots, shape),
        )  # fmt: skip
        self._served[key] = Served(batch, torch.from_numpy(place_T).to(self._device))
        return self._served[key]


class ScoredTokens(NamedTuple):
    """The answers of some sequences, one behind the other.

    logprob_N: differentiable, at the policy's temperature. entropy_N: of the distributions that tokens were drawn from,
        in nats.
    x_NM: the vectors behind the final norm that each token was drawn from.
    plain_N: log-probabilities as the engine reports them, in front of the temperature.
    """

    logprob_N: Tensor
    entropy_N: Tensor
    x_NM: Tensor
    plain_N: Tensor


class TrainedPolicy:
    """A decoder that scores answers with the engine's bits, and with gradients. temperature: by which scores are
    divided."""

    temperature = 1.0

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        check_policy(spec)
        self.decoder = Decoder(spec, policy_ops(Platform.of(device)), dtype=dtype, device=device)
        self.device = device

    def check_loaded(self) -> None:
        """Raise InvalidConfig for a model whose engine multiplies by other weights than its files hold."""
        for module in self.decoder.modules():
            if (isinstance(module, Linear) and module.multipliers and any(f != 1 for _, f in module.multipliers)) or (
                isinstance(module, Norm) and module._multiplier != 1
            ):
                raise InvalidConfig("reinforcement learning is not for models with multipliers of weights yet.")

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> ScoredTokens:
        """Return the answers of sequences, each a prompt's tokens and an answer's."""
        tokens = [[*prompt, *answer][:-1] for prompt, answer in sequences]
        lengths = [len(each) for each in tokens]
        ends = np.cumsum(lengths)
        at_N = np.concatenate(
            [np.arange(end - len(answer), end) for end, (_, answer) in zip(ends, sequences, strict=True)]
        )
        targets_N = torch.tensor([token for _, answer in sequences for token in answer], device=self.device)
        tokens_T = torch.tensor([token for each in tokens for token in each], device=self.device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        states: Any = PolicyStates(lengths, self.decoder.ops, self.device)
        hidden = self.decoder(tokens_T, positions_T, states).at(torch.from_numpy(at_N).to(self.device))
        x_NM = self.decoder.normed(hidden)
        parts = zip(x_NM.split(SCORED_AT_ONCE), targets_N.split(SCORED_AT_ONCE), strict=True)
        found = [checkpoint(self._scored, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        logprob_N, entropy_N, plain_N = (torch.cat(each) for each in zip(*found, strict=True))
        return ScoredTokens(logprob_N, entropy_N, x_NM, plain_N)

    def _scored(self, x_CM: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_CV = self.decoder.scored(x_CM)
        with torch.no_grad():
            value_C = self.decoder.ops.score_tokens(logits_CV.detach(), targets_C, 0).logprob_R
            all_CV = (logits_CV.float() / self.temperature).log_softmax(-1)
            entropy_C = -(torch.where(all_CV == -torch.inf, 0, all_CV) * all_CV.exp()).sum(-1)
        if self.temperature == 1 and not torch.is_grad_enabled():
            return value_C, entropy_C, value_C
        graph_C = (logits_CV.float() / self.temperature).log_softmax(-1).gather(1, targets_C[:, None])[:, 0]
        return (valued(graph_C, value_C) if self.temperature == 1 else graph_C), entropy_C, value_C


def check_policy(spec: ModelSpec) -> None:
    """Raise InvalidConfig for a model that is not trained by reinforcement here."""
    plain = all(
        isinstance(layer.mixer, AttentionSpec)
        and isinstance(layer.feed_forward, MLPSpec)
        and all(type(state) is KVSpec for state in layer.mixer.states)
        for layer in spec.layers
    )
    if not plain or not spec.scores or spec.encoder is not None:
        raise InvalidConfig(
            "reinforcement learning is for models whose layers are attention and feed-forwards of one expert."
        )
