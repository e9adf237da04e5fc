"""A decoder as one function of tensors, with its key-value cache among the inputs and outputs, and its ONNX file.

The function takes the new tokens of some sequences, and of each layer the keys and values of the tokens before. It
returns the scores behind each sequence's last token, and the keys and values with the new ones behind them.

Legend:
    B  sequences
    S  new tokens of each
    P  tokens of each that the cache holds
    K  P + S, tokens that a query may see
    T  new tokens of all sequences, B * S
    H  query heads
    G  key/value heads
    D  head width
    X  columns of the fused projection
    V  vocabulary
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ABSENT, AttentionSpec, MLPSpec, ModelSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.heads import Heads
from ridgeline.weights.loader import load_weights, read_model_config

# An exporter knows torch's functions, and none of our kernels
TORCH_OPS = {name: "torch" for name, op in OPS.items() if any(each.name == "torch" for each in op.implementations)}


def _rope(q_THD: Tensor, k_TGD: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as the op does, without fused multiply-adds, for which ONNX has no operator."""
    cos_T1y, sin_T1y = cos_sin_ZY[positions_T].unsqueeze(1).chunk(2, dim=-1)
    half, found = cos_T1y.shape[-1], []
    for x_THD in (q_THD, k_TGD):
        a, b, rest = x_THD[..., :half], x_THD[..., half : 2 * half], x_THD[..., 2 * half :]
        rotated = a * cos_T1y - b * sin_T1y, b * cos_T1y + a * sin_T1y
        found.append(torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1))
    return found[0], found[1]


class Caches:
    """The states of all layers: the tensors that came in, and behind a pass those that go out.

    past: keys and values of each layer in turn, [B, G, P, D] each.
    length: S.
    """

    live_T: Tensor | None = None

    def __init__(self, past: Sequence[Tensor], length: int) -> None:
        self.past, self.present = past, list(past)
        self.batch, self.length = past[0].shape[0], length
        before = past[0].shape[2]
        query_S1 = torch.arange(length, device=past[0].device)[:, None] + before
        self._distance_SK = query_S1 - torch.arange(before + length, device=past[0].device)

    def __getitem__(self, layer: int) -> LayerCache:
        return LayerCache(self, 2 * layer)

    def seen(self, window: int | None) -> Tensor:
        """Return which keys a query may see: [S, K]."""
        seen_SK = self._distance_SK >= 0
        return seen_SK if window is None else seen_SK & (self._distance_SK < window)


class LayerCache:
    """The keys and values of one layer, an `layers.attention.Attends`."""

    def __init__(self, caches: Caches, place: int) -> None:
        self.caches, self.place = caches, place

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        caches, spec, here = self.caches, heads.spec, slice(self.place, self.place + 2)
        sizes, (past_k, past_v) = (caches.batch, caches.length), caches.past[here]
        split = heads.split(qkv_TX, positions_T)
        q_BHSD, k_BGSD, v_BGSD = (x.view(*sizes, *x.shape[1:]).transpose(1, 2) for x in split)
        k_BGKD, v_BGKD = torch.cat((past_k, k_BGSD), dim=2), torch.cat((past_v, v_BGSD), dim=2)
        caches.present[here] = k_BGKD, v_BGKD
        grouped, seen_SK = spec.num_heads != spec.num_kv_heads, caches.seen(spec.window)
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD, k_BGKD, v_BGKD, attn_mask=seen_SK, scale=spec.scale, enable_gqa=grouped
        )
        return out_BHSD.transpose(1, 2).reshape(caches.batch * caches.length, spec.q_size)


class CachedNetwork(nn.Module):
    """The function that is exported."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the scores behind the last tokens, [B, V], then keys and values of each layer, [B, G, K, D].

        input_ids: int64 [B, S]. past: keys and values of each layer, [B, G, P, D].
        """
        batch, length = input_ids.shape
        positions_T = (torch.arange(length, device=input_ids.device) + past[0].shape[2]).repeat(batch)
        caches = Caches(past, length)
        hidden = self.decoder(input_ids.flatten(), positions_T, caches)
        last_B = torch.arange(1, batch + 1, device=input_ids.device) * length - 1
        return (self.decoder.logits(hidden.at(last_B)), *caches.present)


def check_exportable(spec: ModelSpec) -> None:
    """Raise InvalidConfig, naming the part, for a model whose layers are not causal attention and a feed-forward."""
    for layer in spec.layers:
        mixer, feed = layer.mixer, layer.feed_forward
        if not isinstance(mixer, AttentionSpec) or mixer.bidirectional:
            raise InvalidConfig(f"only causal attention is exported to ONNX, and this model has {mixer.kind}.")
        odd = [name for name in ("softcap", "alibi", "sinks") if getattr(mixer, name)]
        if odd:
            raise InvalidConfig(f"attention with {odd[0]} is not exported to ONNX.")
        if not isinstance(feed, MLPSpec) and feed is not ABSENT:
            raise InvalidConfig(f"only dense feed-forwards are exported to ONNX, and this model has {feed.kind}.")


def open_network(folder: Path, context: int) -> CachedNetwork:
    """Return the model in float32, for contexts of up to so many tokens. Raise InvalidConfig or ModelLoadError."""
    config = read_model_config(folder)
    check_exportable(config.spec)
    positions = min(context, config.spec.max_position_embeddings)
    ops, cpu = Ops(Platform(device_type="cpu"), TORCH_OPS), torch.device("cpu")
    ops.rope = _rope
    decoder = Decoder(config.spec, ops, dtype=torch.float32, device=cpu, max_positions=positions)
    load_weights(decoder, folder, config.weights)
    decoder.requires_grad_(False)
    return CachedNetwork(decoder).eval()


def empty_past(spec: ModelSpec, batch: int, tokens: int) -> list[Tensor]:
    """Return zeros as the keys and values of so many tokens, of every layer."""
    found = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        shape = batch, layer.mixer.num_kv_heads, tokens, layer.mixer.head_dim
        found += [torch.zeros(shape), torch.zeros(shape)]
    return found


def names(prefix: str, layers: int) -> list[str]:
    """Return the names of keys and values, as inputs ("past") or outputs ("present")."""
    return [f"{prefix}_{layer}_{kind}" for layer in range(layers) for kind in ("key", "value")]


def export(network: CachedNetwork, file: Path, opset: int) -> None:
    """Write the ONNX file, its weights beside it in `file`.data. The sizes B, S and P stay free.

    Raise InvalidConfig for an opset that the exporter does not reach.
    """
    spec = network.decoder.spec
    layers, given = len(spec.layers), (torch.zeros(2, 3, dtype=torch.int64), empty_past(spec, 2, 5))
    batch, tokens, past = Dim("batch"), Dim("tokens"), Dim("past")
    free = {"input_ids": {0: batch, 1: tokens}, "past": [{0: batch, 2: past}] * (2 * layers)}
    for told in ("torch.onnx", "onnxscript"):  # of torchvision, which is not needed, and of opsets, as below
        logging.getLogger(told).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that two equal axes share
        program = torch.onnx.export(
            network, given, dynamo=True, dynamic_shapes=free, opset_version=opset, verbose=False,
            input_names=["input_ids", *names("past", layers)], output_names=["logits", *names("present", layers)],
        )  # fmt: skip
    assert program is not None
    if (made := program.model.opset_imports[""]) != opset:
        raise InvalidConfig(f"torch's exporter writes this model in opset {made} and cannot turn it into {opset}.")
    program.save(str(file), external_data=True)
