"""Write a model folder with random weights, so that two engines can load the same numbers.

    python -m benchmarks.random_model CONFIG_FOLDER OUT [--layers 12] [--seed 0] [--device cuda] [--cycle 16]

Weights are those of `load_format="dummy"`: normal numbers of the same spread everywhere, norms of one. A mixture's
router is made wider (--router), so that its choices differ from token to token as a trained one's do.

With --cycle N the model writes the same N tokens again and again, as a proposer of repetitions likes it: the layers
compute as always, but the products at their ends have weights of zero, so a token's own embedding reaches the output
matrix, and that has its numbers in the row of the token that comes next.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.op import Platform
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--router", type=float, default=0.05)
    parser.add_argument("--cycle", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    if not (a.source / "config.json").is_file():
        parser.error(f"{a.source} holds no config.json; name the folder of a model's config.")
    device = torch.device(a.device)
    size = write(a.source, a.out, layers=a.layers, seed=a.seed, device=device, router=a.router, cycle=a.cycle)
    print(f"{size / 1e9:.2f} GB in {a.out}")


if __name__ == "__main__":
    main()
