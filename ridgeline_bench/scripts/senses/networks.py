"""Passes of LLaVA and Whisper over the parameters that transformers' modules hold, for training: each projection of
queries, keys and values is one product, and nothing is padded, cached or checked. Their results are those of the
modules.

Legend:
    N  examples
    T  tokens, patches or frames
    M  width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _norm(norm: Any, x_NTM: Tensor) -> Tensor:
    return functional.layer_norm(x_NTM, norm.weight.shape, norm.weight, norm.bias, 1e-5)


def _heads(x_NTM: Tensor, width: int) -> Tensor:
    return x_NTM.unflatten(-1, (-1, width)).transpose(1, 2)


def _joined(maps: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """Return maps of one input as one. A map without a bias beside others with one has zeros."""
    weight = torch.cat([each.weight for each in maps])
    if all(each.bias is None for each in maps):
        return weight, None
    return weight, torch.cat(
        [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias for each in maps]
    )


def _attended(attention: Any, x_NTM: Tensor, out: Any, width: int, *, causal: bool, rope: Any = None) -> Tensor:
    maps = (attention.q_proj, attention.k_proj, attention.v_proj)
    parts = functional.linear(x_NTM, *_joined(maps)).split([len(each.weight) for each in maps], -1)
    q, k, v = (_heads(each, width) for each in parts)
    if rope is not None:
        q, k = _turned(q, *rope), _turned(k, *rope)
    if len(maps[1].weight) != len(maps[0].weight):
        times = len(maps[0].weight) // len(maps[1].weight)
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out(found.transpose(1, 2).flatten(2))


def _crossed(attention: Any, x_NTM: Tensor, states_NTM: Tensor, width: int) -> Tensor:
    q = _heads(attention.q_proj(x_NTM), width)
    both = functional.linear(states_NTM, *_joined((attention.k_proj, attention.v_proj)))
    k, v = (_heads(each, width) for each in both.chunk(2, -1))
    found = functional.scaled_dot_product_attention(q, k, v)
    return attention.out_proj(found.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rope(length: int, width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of Llama's positions, from 0: [T, head width]."""
    turn = base ** -(torch.arange(0, width, 2, device=like.device) / width)
    angle = torch.outer(torch.arange(length, device=like.device), torch.cat((turn, turn)))
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def tower(model: Any, pixels_NCHW: Tensor) -> Tensor:
    """Return what CLIP's last layer makes of each patch, without the class token: [N, T, M]."""
    given, config = model.embeddings, model.config
    size = config.patch_size
    squares = pixels_NCHW.unflatten(2, (-1, size)).unflatten(4, (-1, size)).permute(0, 2, 4, 1, 3, 5)
    patches = functional.linear(squares.flatten(1, 2).flatten(2), given.patch_embedding.weight.flatten(1))
    first = given.class_embedding.expand(len(patches), 1, -1)
    x = torch.cat((first, patches), 1) + given.position_embedding.weight
    x = _norm(model.pre_layrnorm, x)
    width = config.hidden_size // config.num_attention_heads
    for layer in model.encoder.layers:
        own = layer.self_attn
        x = x + _attended(own, _norm(layer.layer_norm1, x), own.out_proj, width, causal=False)
        x = x + layer.mlp.fc2(functional.gelu(layer.mlp.fc1(_norm(layer.layer_norm2, x))))
    return x[:, 1:]


def llama(model: Any, x_NTM: Tensor) -> Tensor:
    """Return Llama's last hidden states of vectors that stand for tokens: [N, T, M]."""
    config = model.config
    turns = rope(x_NTM.shape[1], config.head_dim, 10000.0, x_NTM)

    def norm(norm: Any, x: Tensor) -> Tensor:
        return functional.rms_norm(x, norm.weight.shape, norm.weight, config.rms_norm_eps)

    x = x_NTM
    for layer in model.layers:
        own, mlp = layer.self_attn, layer.mlp
        x = x + _attended(own, norm(layer.input_layernorm, x), own.o_proj, config.head_dim, causal=True, rope=turns)
        y = norm(layer.post_attention_layernorm, x)
        gate, up = functional.linear(y, *_joined((mlp.gate_proj, mlp.up_proj))).chunk(2, -1)
        x = x + mlp.down_proj(functional.silu(gate) * up)
    return norm(model.norm, x)


def listened(encoder: Any, features_NFT: Tensor) -> Tensor:
    """Return the states of Whisper's encoder: [N, T, M]."""
    x = functional.gelu(encoder.conv1(features_NFT))
    x = functional.gelu(encoder.conv2(x)).mT + encoder.embed_positions.weight
    width = encoder.config.d_model // encoder.config.encoder_attention_heads
    for layer in encoder.layers:
        own = layer.self_attn
        x = x + _attended(own, _norm(layer.self_attn_layer_norm, x), own.out_proj, width, causal=False)
        x = x + layer.fc2(functional.gelu(layer.fc1(_norm(layer.final_layer_norm, x))))
    return _norm(encoder.layer_norm, x)


def written(decoder: Any, ids_NT: Tensor, states_NTM: Tensor) -> Tensor:
    """Return the last hidden states of Whisper's decoder: [N, T, M]."""
    x = decoder.embed_tokens(ids_NT) + decoder.embed_positions.weight[: ids_NT.shape[1]]
    width = decoder.config.d_model // decoder.config.decoder_attention_heads
    for layer in decoder.layers:
        own = layer.self_attn
        x = x + _attended(own, _norm(layer.self_attn_layer_norm, x), own.out_proj, width, causal=True)
        x = x + _crossed(layer.encoder_attn, _norm(layer.encoder_attn_layer_norm, x), states_NTM, width)
        x = x + layer.fc2(functional.gelu(layer.fc1(_norm(layer.final_layer_norm, x))))
    return _norm(decoder.layer_norm, x)
