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
import sys
from pathlib import Path

import gguf
import numpy as np

from ridgeline_bench.quality import k_quants


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


def write(folder: Path, out: Path, kind: str = "BF16") -> Path:
    """Write the file, and return its path. folder: a folder with config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, layers = config.get("head_dim") or hidden // heads, config["num_hidden_layers"]
    kind_of_model = config["model_type"]
    if kind_of_model not in ("qwen3", "llama"):
        raise SystemExit(f"{folder} is a {kind_of_model!r}, and only qwen3 and llama can be written.")
    writer = gguf.GGUFWriter(out, kind_of_model)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(0)
    kept: dict[tuple[str, int, int], np.ndarray] = {}

    def matrix(name: str, outputs: int, inputs: int) -> None:
        tied = name == "token_embd" and config.get("tie_word_embeddings")
        own = type_of("output" if tied else name, kind, layers)
        number, key = gguf.GGMLQuantizationType[own], (own, outputs, inputs)
        if own in BLOCKS:
            kept[key] = kept[key] if key in kept else BLOCKS[own](rng, outputs, inputs)
            blocks = kept[key]
        else:
            blocks = gguf.quants.quantize(rng.standard_normal((outputs, inputs), np.float32) * 0.02, number)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=number)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", vocab, hidden)
    norm("output_norm", hidden)
    if not config.get("tie_word_embeddings"):
        matrix("output", vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm", hidden)
        if kind_of_model == "qwen3":
            norm(f"{block}.attn_q_norm", head_dim)
            norm(f"{block}.attn_k_norm", head_dim)
        norm(f"{block}.ffn_norm", hidden)
        matrix(f"{block}.attn_q", heads * head_dim, hidden)
        matrix(f"{block}.attn_k", kv_heads * head_dim, hidden)
        matrix(f"{block}.attn_v", kv_heads * head_dim, hidden)
        matrix(f"{block}.attn_output", hidden, heads * head_dim)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
