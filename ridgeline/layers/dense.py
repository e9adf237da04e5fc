"""Mixers over whole sequences at once, without a cache. Training and tests give these to the decoder as its states.

Legend:
    T  tokens of all sequences, B * S where all are of one length
    B  sequences
    S  tokens per sequence
    H  query heads
    G  key/value heads
    D  head width
    X  (H + 2 G) D, columns of the fused projection
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.core.specs.model import AttentionSpec, ModelSpec
from ridgeline.core.specs.state import RecurrentSpec, StateSpec
from ridgeline.kernels.attention.latent.op import prepared
from ridgeline.kernels.attention.paged.op import softmax_with_sinks
from ridgeline.kernels.attention.sparse.op import best, index_scores
from ridgeline.kernels.attention.sparse.op import prepared as prepared_index
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.scans.metadata import ScanMetadata, rows_of
from ridgeline.layers.heads import Heads
from ridgeline.layers.indexer import Index
from ridgeline.layers.latent_attention import Latents

WIDEST = 256  # channels of a head, in the kernel for whole sequences
FASTEST = [  # torch's kernels for sequences of one length, in this order on Hopper (docs/benchmarks.md)
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class DenseCausal:
    """The states of all layers, without memory: T is `batch` sequences of equal length, run from their beginning. It
    offers every kind's operation, so it can stand for any layer's state."""

    live_T: Tensor | None = None

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __getitem__(self, layer: int) -> DenseCausal:
        return self

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Attend as `layers.attention.Attends` does, without rounding."""
        q_THD, k_TGD, v_TGD = heads.split(qkv_TX, positions_T)
        q_BHSD, k_BGSD, v_BGSD = (
            x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q_THD, *self.cached(k_TGD, v_TGD))
        )
        spec = heads.spec
        if spec.softcap is not None or spec.alibi or spec.sinks:
            return _scored(q_BHSD, k_BGSD, v_BGSD, heads).transpose(1, 2).flatten(0, 1).flatten(1)
        length = q_BHSD.shape[2]
        if spec.window is not None and length > spec.window and length % spec.window == 0:
            return _in_blocks(q_BHSD, k_BGSD, v_BGSD, spec).transpose(1, 2).flatten(0, 1).flatten(1)
        plain = (spec.window or spec.chunk or length) >= length
        mask_SS = None if plain else _seen(length, spec, q_BHSD.device)
        out_BHSD = _attended(q_BHSD, k_BGSD, v_BGSD, spec, mask_SS)
        return out_BHSD.transpose(1, 2).flatten(0, 1).flatten(1)

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: Index | None
    ) -> Tensor:
        """Attend as `layers.latent_attention.AttendsToLatents` does, without rounding, over keys and values that are
        made of the latents."""
        spec = latents.spec
        kept_TW, q_THY = prepared(
            q_THX,
            latent_TW,
            latents.weight_L,
            spec.norm.eps,
            latents.cos_sin_ZY,
            latents.angles(positions_T),
            spec.interleaved,
        )
        latent_TL, r_TY = kept_TW.split((spec.rank, spec.rope_dim), dim=-1)
        k_THK, v_THV = latents.expand.keys_and_values(latent_TL, slice(None))
        q_THX = torch.cat((q_THX[..., : spec.key_dim], q_THY), dim=-1)
        k_THX = torch.cat((k_THK, r_TY[:, None].expand(-1, spec.num_heads, -1)), dim=-1)
        q_BHSX, k_BHSX, v_BHSV = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q_THX, k_THX, v_THV))
        mask = None if index is None else self._chosen(index, positions_T, latents)
        attended_BHSV = F.scaled_dot_product_attention(
            q_BHSX, k_BHSX, v_BHSV, attn_mask=mask, is_causal=mask is None, scale=spec.scale
        )
        return attended_BHSV.transpose(1, 2).flatten(0, 1).flatten(1)

    def _chosen(self, index: Index, positions_T: Tensor, latents: Latents) -> Tensor | None:
        """Return True where the indexer lets a token see another: bool [B, 1, S, S], which stands for the choice here.
        None: all see all before them. The choice has no gradient, so the indexer's own weights have none."""
        if len(positions_T) // self.batch <= index.spec.selected:
            return None
        if latents.spec.chooser is not None:
            return index.chosen_TK
        angles_T = latents.angles(positions_T)
        with torch.no_grad():
            keys_TD, q_TID = prepared_index(
                index.q_TID, index.key_TD, index.norm_2D, index.spec.norm.eps, latents.cos_sin_ZY, angles_T,
                index.spec.interleaved,
            )  # fmt: skip
            parts = (x.unflatten(0, (self.batch, -1)) for x in (q_TID, index.weights_TI, keys_TD))
            found = []
            for q_SID, weights_SI, keys_SD in zip(*parts, strict=True):
                seen_SS = _causal(len(keys_SD), keys_SD.device)
                found.append(best(index_scores(q_SID, weights_SI, keys_SD), seen_SS, index.spec.selected))
        index.chosen_TK = torch.stack(found)[:, None]
        return index.chosen_TK

    def cached(self, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values as a cache would give them back: unchanged here."""
        return k_TGD, v_TGD


class PackedCausal(DenseCausal):
    """The states of all layers, without memory: T is sequences of these lengths one behind the other, each run from its
    beginning. No token sees one of another sequence."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(1)
        self.lengths = list(lengths)
        self._intervals: dict[int | None, tuple[Tensor, Tensor]] = {}

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Attend as `layers.attention.Attends` does, without rounding. On a GPU one kernel has all sequences, whose
        borders are a mask; elsewhere, and where scores are capped or seen in chunks, they run one by one."""
        spec = heads.spec
        changed = spec.softcap is not None or spec.chunk is not None
        if qkv_TX.is_cuda and not changed and spec.head_dim <= WIDEST:
            return self.masked(qkv_TX, positions_T, heads)
        alone = zip(qkv_TX.split(self.lengths), positions_T.split(self.lengths), strict=True)
        whole = super().attend
        return torch.cat([whole(qkv, positions, heads) for qkv, positions in alone])

    def masked(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> Tensor:
        """Attend to all sequences at once: as a batch where they have one length and no window, slopes or sinks, else
        by a kernel in Triton with a mask of documents."""
        spec = heads.spec
        q_THD, k_TGD, v_TGD = (x.to(qkv_TX.dtype) for x in _split(qkv_TX, positions_T, heads))
        longest = max(self.lengths)
        slopes_H, sinks_H = heads.softmax.slopes_H, heads.softmax.sinks_H
        wide = (spec.window is None or spec.window >= longest) and slopes_H is None and sinks_H is None
        if wide and len(set(self.lengths)) == 1 and qkv_TX.is_cuda and qkv_TX.itemsize == 2:
            q, k, v = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
            with sdpa_kernel(FASTEST, set_priority=True):
                out_BHSD = _attended(q, k, v, spec, None)
            return out_BHSD.transpose(1, 2).flatten(0, 1).flatten(1)
        # Triton, which is imported only where it runs
        from ridgeline.kernels.attention.triton_sdpa import WholeAttention

        q_1HTD, k_1GTD, v_1GTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        seen = self._seen_by(spec.window, qkv_TX.device)
        sinks_H = None if sinks_H is None else sinks_H.float()
        out_1HTD, _ = WholeAttention.apply(q_1HTD, k_1GTD, v_1GTD, sinks_H, seen, slopes_H, spec.scale)
        return out_1HTD[0].transpose(0, 1).flatten(1)

    def _seen_by(self, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the keys that each query sees, as an interval, which is found once for all layers."""
        if window not in self._intervals:
            from ridgeline.kernels.attention.triton_sdpa import Intervals, KeyMasks  # likewise

            documents_T = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
            # there the token itself does not count
            masks = KeyMasks(True, None if window is None else window - 1, documents_T)
            count = len(documents_T)
            first_T, behind_T = masks.intervals(count, count, documents_T.device)  # on the host, which waits for none
            ends_2T = torch.stack((first_T, behind_T))
            if device.type == "cuda":  # the host does not wait for the copy
                ends_2T = ends_2T.pin_memory().to(device, non_blocking=True)
            self._intervals[window] = Intervals(tuple(ends_2T.to(device)))
        return self._intervals[window]

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: Index | None
    ) -> Tensor:
        """Attend as `DenseCausal` does, one sequence after the other. Raise NotImplementedError for an indexer."""
        if index is not None:
            raise NotImplementedError("sequences of unlike lengths go without an indexer.")
        alone = zip(*(x.split(self.lengths) for x in (q_THX, latent_TW, positions_T)), strict=True)
        whole = super().attend_to_latents
        return torch.cat([whole(q, latent, positions, latents, None) for q, latent, positions in alone])


def _split(qkv_TX: Tensor, positions_T: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, normalised and rotated, as `Heads.split` does."""
    spec, angles_ZY = heads.spec, heads.cos_sin_ZY
    every = spec.num_heads + 2 * spec.num_kv_heads
    plain = heads.q_norm_D is None and not spec.v_norm and qkv_TX.shape[-1] == every * spec.head_dim
    if angles_ZY is None or not plain or heads.ops.chosen["rope"] != "triton_training":
        return heads.split(qkv_TX, positions_T)
    from ridgeline.kernels.small.rotary.triton_training import rotated_heads  # Triton, likewise

    return rotated_heads(qkv_TX, angles_ZY, positions_T, spec.num_heads, spec.num_kv_heads, spec.head_dim)


def _attended(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Return causal attention, or that of a mask."""
    return F.scaled_dot_product_attention(
        q_BHSD,
        k_BGSD,
        v_BGSD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )


def _in_blocks(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, spec: AttentionSpec) -> Tensor:
    """Return attention within a window over several windows' tokens. A block as long as the window sees itself and the
    block before, so work and masks grow with the tokens and not with their square."""
    window = spec.window
    assert window is not None
    first = _attended(q_BHSD[:, :, :window], k_BGSD[:, :, :window], v_BGSD[:, :, :window], spec, None)
    blocks = [x.unflatten(2, (-1, window)).transpose(1, 2) for x in (q_BHSD, k_BGSD, v_BGSD)]  # [B, block, head, …]
    q, own = blocks[0][:, 1:].flatten(0, 1), [x[:, 1:] for x in blocks[1:]]
    k, v = (torch.cat((x[:, :-1], y), dim=3).flatten(0, 1) for x, y in zip(blocks[1:], own, strict=True))
    query, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    rest = _attended(q, k, v, spec, (key > query) & (key <= query + window))
    rest = rest.unflatten(0, (len(q_BHSD), -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, rest), dim=2)


def _scored(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, heads: Heads) -> Tensor:
    """Compute attention in float32 whose scores are changed before the softmax, by a cap or by slopes, or joined by
    sinks."""
    spec, slopes_H = heads.spec, heads.softmax.slopes_H
    per_kv, length = spec.num_heads // spec.num_kv_heads, q_BHSD.shape[2]
    k_BHSD, v_BHSD = (x.repeat_interleave(per_kv, dim=1) for x in (k_BGSD, v_BGSD))
    scores_BHSS = spec.scale * (q_BHSD.float() @ k_BHSD.float().transpose(-1, -2))
    if spec.softcap is not None:
        scores_BHSS = spec.softcap * torch.tanh(scores_BHSS / spec.softcap)
    if slopes_H is not None:
        position_S = torch.arange(length, device=q_BHSD.device)
        scores_BHSS = scores_BHSS + slopes_H[:, None, None] * (position_S - position_S[:, None])
    seen_SS = _seen(length, spec, q_BHSD.device)
    weights_BHSS = softmax_with_sinks(scores_BHSS.masked_fill(~seen_SS, -torch.inf), heads.softmax.sinks_H)
    return (weights_BHSS @ v_BHSD.float()).to(q_BHSD.dtype)


def _seen(length: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return bool [length, length], True where a query (row) may see a key (column)."""
    seen_SS = _causal(length, device)
    if spec.chunk is not None:
        chunk_S = torch.arange(length, device=device) // spec.chunk
        seen_SS &= chunk_S == chunk_S[:, None]
    return seen_SS if spec.window is None else seen_SS.triu(1 - spec.window)


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def recurs(model: ModelSpec) -> bool:
    """Return True if a layer keeps a state of constant size."""
    return any(isinstance(state, RecurrentSpec) for layer in model.layers for state in layer.mixer.states)


def dense_states(
    model: ModelSpec, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> DenseCausal | DenseStates:
    """Return the states of a model of any kind, for `batch` sequences of `length` tokens."""
    return DenseStates(model, batch, length, dtype, device) if recurs(model) else DenseCausal(batch)


class FreshRows(NamedTuple):
    """The state of one recurrent layer for rows that begin with zeros, a `layers.recurrent.Recurs`."""

    parts: tuple[Tensor, ...]
    metadata: ScanMetadata


class DenseStates:
    """The states of all layers of a model with mixers of any kind, without memory between calls: T is `batch` sequences
    of `length` tokens, run from their beginning. The recurrent ops that training takes
    have gradients, and their last states have none."""

    live_T: Tensor | None = None

    def __init__(self, model: ModelSpec, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._attention = DenseCausal(batch)
        self._metadata = rows_of([length] * batch, list(range(1, batch + 1)), device, fresh=True)

    def __getitem__(self, layer: int) -> Any:
        found = tuple(self._state(spec) for spec in self._model.layers[layer].mixer.states)
        return found[0] if len(found) == 1 else found or None

    def _state(self, spec: StateSpec) -> DenseCausal | FreshRows:
        if not isinstance(spec, RecurrentSpec):
            return self._attention
        dtypes = (self._dtype if part.dtype is None else getattr(torch, part.dtype) for part in spec.parts)
        blocks = 1 + self._metadata.num_rows
        parts = (
            torch.zeros(blocks, *part.shape, dtype=dtype, device=self._device)
            for part, dtype in zip(spec.parts, dtypes, strict=True)
        )
        return FreshRows(tuple(parts), self._metadata)


class PackedStates(DenseStates):
    """The states of all layers of a model with mixers of any kind, for sequences of these lengths one behind the other,
    without memory between calls."""

    def __init__(self, model: ModelSpec, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, 1, sum(lengths), dtype, device)
        self._attention = PackedCausal(lengths)
        self._metadata = rows_of(list(lengths), list(range(1, len(lengths) + 1)), device, fresh=True)


def packed_states(
    model: ModelSpec, lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> PackedCausal | PackedStates:
    """Return the states of a model of any kind, for sequences of these lengths one behind the other."""
    return PackedStates(model, lengths, dtype, device) if recurs(model) else PackedCausal(lengths)
