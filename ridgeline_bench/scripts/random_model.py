"""Write a model folder with random weights, so that two engines can load the same numbers.

    python -m ridgeline_bench.scripts.random_model CONFIG_FOLDER OUT [--layers 12] [--seed 0] [--device cuda]
        [--cycle 16]

Weights are those of `load_format="dummy"`: normal numbers of the same spread everywhere, norms of one. A mixture's
router is made wider (--router), so that its choices differ from token to token as a trained one's do.

With --cycle N the model writes the same N tokens again and again, as a proposer of repetitions likes it: the layers
compute as always, but the products at their ends have weights of zero, so a token's own embedding reaches the output
matrix, and that has its numbers in the row of the token that comes next.

With --head OUT is a head of EAGLE-3 for the model of that configuration, of published heads' sizes: one layer like the
model's, which reads three of its layers, and scores for 32,000 of its tokens. Its drafts are no better than chance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from ridgeline.models import model_config
from ridgeline.weights.convert.shards import Planned, split, write_shards
from ridgeline.weights.loader import export_checkpoint, fill_dummy


def repeat(stored: dict[str, Tensor], cycle: int) -> None:
    """Let the largest score behind a token be that of the next of its `cycle` tokens. Raise SystemExit for a model that
    is no Llama."""
    ends = [name for name in stored if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))]
    if not ends or "lm_head.weight" not in stored:
        raise SystemExit("--cycle needs a model with Llama's names and an output matrix of its own.")
    for name in ends:
        stored[name] = torch.zeros_like(stored[name])
    embedding_VM = stored["model.embed_tokens.weight"]
    token_V = torch.arange(len(embedding_VM), device=embedding_VM.device)
    begin_V = token_V - token_V % cycle
    before_V = begin_V + (token_V - 1) % cycle
    stored["lm_head.weight"] = embedding_VM[before_V.clamp(max=len(embedding_VM) - 1)]


def write(
    source: Path, out: Path, *, layers: int | None, seed: int, device: torch.device, router: float, cycle: int = 0
) -> int:
    """Write the folder. Return the number of bytes of its weights."""
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    model = model_config(config)
    ops, dtype = Ops(Platform(device_type="cpu")), getattr(torch, model.dtype)
    decoder = Decoder(model.spec, ops, dtype=dtype, device=device, max_positions=1)
    fill_dummy(decoder, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    for module in decoder.modules():
        if isinstance(module, Experts):
            torch.nn.init.normal_(module.router, std=router, generator=generator)
    stored = export_checkpoint(decoder, model.weights)
    if cycle:
        repeat(stored, cycle)
    out.mkdir(parents=True, exist_ok=True)
    planned = [
        Planned(name=name, shape=list(x.shape), dtype=x.dtype, make=lambda x=x: x.cpu()) for name, x in stored.items()
    ]
    write_shards(out, split(planned, 4 << 30), lambda tensor: None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return sum(each.num_bytes for each in planned)


def write_head(source: Path, out: Path, *, seed: int, vocabulary: int = 32_000) -> int:
    """Write a random head of EAGLE-3. Return the number of bytes of its weights."""
    target = json.loads((source / "config.json").read_text())
    width, inner, layers = target["hidden_size"], target["intermediate_size"], target["num_hidden_layers"]
    heads = target["num_attention_heads"]
    head_width = target.get("head_dim") or width // heads
    q, kv = heads * head_width, target.get("num_key_value_heads", heads) * head_width
    vocabulary = min(vocabulary, target["vocab_size"])
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, target.get("torch_dtype", "bfloat16"))
    stored = {"d2t": torch.zeros(vocabulary, dtype=torch.int64)}
    for name, shape in {
        "fc": (width, 3 * width), "lm_head": (vocabulary, width), "midlayer.self_attn.q_proj": (q, 2 * width),
        "midlayer.self_attn.k_proj": (kv, 2 * width), "midlayer.self_attn.v_proj": (kv, 2 * width),
        "midlayer.self_attn.o_proj": (width, q), "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width), "midlayer.mlp.down_proj": (width, inner),
    }.items():  # fmt: skip
        stored[f"{name}.weight"] = (torch.randn(shape, generator=generator) * 0.02).to(dtype)
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        stored[f"{name}.weight"] = torch.ones(width, dtype=dtype)
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    keys += ("rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act", "torch_dtype")
    taps = {"eagle_aux_hidden_state_layer_ids": [1, layers // 2 - 1, layers - 4]}
    config = {key: target[key] for key in keys if key in target} | {"head_dim": head_width, "num_hidden_layers": 1}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": vocabulary}
    config |= {"attention_bias": False, "tie_word_embeddings": False, "eagle_config": taps}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(stored, out / "model.safetensors")
    return sum(x.nbytes for x in stored.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--router", type=float, default=0.05)
    parser.add_argument("--cycle", type=int, default=0)
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    if not (a.source / "config.json").is_file():
        parser.error(f"{a.source} holds no config.json; name the folder of a model's config.")
    if a.head:
        if "num_attention_heads" not in json.loads((a.source / "config.json").read_text()):
            parser.error(f"{a.source} is no model with attention heads, which a head of EAGLE-3 is made like.")
        print(f"{write_head(a.source, a.out, seed=a.seed) / 1e9:.2f} GB in {a.out}")
        return
    device = torch.device(a.device)
    size = write(a.source, a.out, layers=a.layers, seed=a.seed, device=device, router=a.router, cycle=a.cycle)
    print(f"{size / 1e9:.2f} GB in {a.out}")


if __name__ == "__main__":
    main()
