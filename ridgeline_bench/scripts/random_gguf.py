"""A GGUF file of a Qwen3's or a Llama's shape with random weights, for llama.cpp. It has no tokenizer, and all matrices
have one type.

    python -m ridgeline_bench.scripts.random_gguf CONFIG_FOLDER OUT.gguf [BF16 | Q8_0 | F32 … | Q4_K_M]

Tensor names and keys are those of llama.cpp's conversion for `qwen3` and `llama`; factors for long contexts, which cost
no time, are left out. Q4_K_M is llama.cpp's mixture: Q6_K for the output matrix, and for values and `down` of half the
layers, otherwise Q4_K. The gguf package cannot encode these, so their blocks have random codes. Matrices of one shape
and type are copies of each other then, which saves time and memory.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.weights.formats.gguf_file import TENSOR_TYPES
from ridgeline_bench.quality import k_quants

NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALIGNED = 32  # bytes between which a tensor's data begins
Tensor = tuple[str, tuple[int, ...], str]  # its name, shape as in torch, and type


def type_of(name: str, kind: str, layers: int) -> str:
    """Return the type of a matrix, by its name in the file."""
    if kind != "Q4_K_M":
        return kind
    if name == "output":
        return "Q6_K"
    _, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    return k_quants.type_of(PARTS.get(part, part), int(layer or 0), layers)


def q4_k(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """Return random blocks of 256 weights: two float16 scales, 12 bytes of six-bit scales and minima, 128 of codes."""
    count = outputs * inputs // 256
    blocks = rng.integers(0, 256, (count, 144), np.uint8)
    blocks[:, :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


def q6_k(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """Return random blocks of 256 weights: 192 bytes of codes, 16 of int8 scales, a float16 scale."""
    count = outputs * inputs // 256
    blocks = rng.integers(0, 256, (count, 210), np.uint8)
    blocks[:, 208:] = np.array([1.5e-5], np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


PARTS = {"attn_v": "v", "ffn_down": "down"}
BLOCKS = {"Q4_K": q4_k, "Q6_K": q6_k}


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the bytes of float32 values in a type."""
    if kind in PLAIN:
        return torch.from_numpy(values).to(PLAIN[kind]).view(torch.uint8).numpy()
    import gguf  # only here, since nothing else of this needs the package

    found: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return found


def header(values: Mapping[str, Any], tensors: list[Tensor]) -> bytes:
    """Return all that comes before the tensors' data, which begins at a multiple of ALIGNED."""

    def text(x: str) -> bytes:
        return struct.pack("<Q", len(x.encode())) + x.encode()

    def typed(x: str | float) -> bytes:
        if isinstance(x, str):
            return struct.pack("<I", 8) + text(x)
        return struct.pack("<If", 6, x) if isinstance(x, float) else struct.pack("<II", 4, x)

    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    parts += [text(key) + typed(value) for key, value in values.items()]
    at = 0
    for name, shape, kind_of_tensor in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [text(name), sizes, struct.pack("<IQ", NUMBERS[kind_of_tensor], at)]
        at += aligned(num_bytes(shape, kind_of_tensor))
    found = b"".join(parts)
    return found.ljust(aligned(len(found)), b"\0")


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def num_bytes(shape: tuple[int, ...], kind: str) -> int:
    how = TENSOR_TYPES[NUMBERS[kind]]
    return prod(shape) // how.block * how.bytes


def tensors_of(config: Mapping[str, Any], kind: str) -> Iterator[Tensor]:
    """Yield the tensors of a model, in the order of the file."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = heads_of(config)
    layers, tied = config["num_hidden_layers"], config.get("tie_word_embeddings")

    def matrix(name: str, outputs: int, inputs: int) -> Tensor:
        own = type_of("output" if tied and name == "token_embd" else name, kind, layers)
        return f"{name}.weight", (outputs, inputs), own

    def norm(name: str, width: int) -> Tensor:
        return f"{name}.weight", (width,), "F32"

    yield matrix("token_embd", vocab, hidden)
    yield norm("output_norm", hidden)
    if not tied:
        yield matrix("output", vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        yield norm(f"{block}.attn_norm", hidden)
        if config["model_type"] == "qwen3":
            yield norm(f"{block}.attn_q_norm", head_dim)
            yield norm(f"{block}.attn_k_norm", head_dim)
        yield norm(f"{block}.ffn_norm", hidden)
        yield matrix(f"{block}.attn_q", heads * head_dim, hidden)
        yield matrix(f"{block}.attn_k", kv_heads * head_dim, hidden)
        yield matrix(f"{block}.attn_v", kv_heads * head_dim, hidden)
        yield matrix(f"{block}.attn_output", hidden, heads * head_dim)
        yield matrix(f"{block}.ffn_gate", inner, hidden)
        yield matrix(f"{block}.ffn_up", inner, hidden)
        yield matrix(f"{block}.ffn_down", hidden, inner)


def heads_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the heads of queries and of keys, and their width."""
    heads = config["num_attention_heads"]
    return heads, config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads


def values_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the file with their values."""
    own = config["model_type"]
    heads, kv_heads, head_dim = heads_of(config)
    found = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]), "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }  # fmt: skip
    keys = {f"{own}.{name}": value for name, value in found.items()}
    return {"general.architecture": own, **keys, "tokenizer.ggml.model": "none"}


def write(folder: Path, out: Path, kind: str = "BF16") -> Path:
    """Write the file, and return its path. folder: a folder with config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ("qwen3", "llama"):
        raise SystemExit(f"{folder} is a {config['model_type']!r}, and only qwen3 and llama can be written.")
    tensors, rng = list(tensors_of(config, kind)), np.random.default_rng(0)
    kept: dict[tuple[tuple[int, ...], str], np.ndarray] = {}
    with out.open("wb") as file:
        file.write(header(values_of(config), tensors))
        for _, shape, own in tensors:
            if len(shape) == 1:
                data = np.ones(shape, np.float32)
            elif own in BLOCKS:
                if (shape, own) not in kept:
                    kept[shape, own] = BLOCKS[own](rng, *shape)
                data = kept[shape, own]
            else:
                data = encoded(rng.standard_normal(shape, np.float32) * 0.02, own)
            file.write(data.data)
            file.write(bytes(aligned(data.nbytes) - data.nbytes))
    return out


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
