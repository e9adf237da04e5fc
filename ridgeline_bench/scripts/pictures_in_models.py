"""Print what one picture costs a model that puts its vectors among the tokens, and one that attends to them across:

    python -m ridgeline_bench.scripts.pictures_in_models [--tiles 4] [--text 64] [--draw FILE.svg]

--draw draws the operations of a picture over the tokens that are written behind it, and the cache's bytes over the
pictures of a prompt. All of it is arithmetic from the models' specs, for weights and caches of 2 bytes a number.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ridgeline.core.specs.model import CrossAttentionSpec, ModelSpec
from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.models import model_config
from ridgeline.perf.precision import precision
from ridgeline.perf.towers import tower_ops
from ridgeline_bench.svg import Panel, picture

DTYPE = "bfloat16"
WRITTEN = (1, 16, 64, 256, 1024, 4096)  # tokens of an answer in the picture
LLAVA = Path(__file__).parents[2] / "benchmarks" / "models" / "llava-1.5-7b" / "config.json"
MLLAMA: dict[str, Any] = {  # Llama-3.2-11B-Vision
    "architectures": ["MllamaForConditionalGeneration"],
    "text_config": {},
    "vision_config": {"image_size": 560},
}


def tower_flops(tower: TowerSpec) -> float:
    """Return the floating-point operations of a tower on one picture, its attention and norms included."""
    if isinstance(tower, TiledTowerSpec):
        views = [tower.side**2] * tower.tiles
    else:
        assert tower.grid is not None
        views = [tower.grid.side**2]
    return sum(op.count * op.cost.flops for op in tower_ops(tower, views, precision(DTYPE)))


def merged(spec: ModelSpec, text: int) -> dict[str, float]:
    """Return the costs of a picture whose vectors stand among the tokens, in front of so many tokens of text."""
    assert spec.tower is not None
    assert spec.tower.grid is not None
    vectors = spec.tower.grid.side**2
    each = sum(p.inputs * p.outputs for layer in spec.layers for p in layer.products(spec.hidden_size).values())
    queries = sum(layer.attention.q_size for layer in spec.layers)
    kept = sum(state.token_bytes(DTYPE) for layer in spec.layers for state in layer.mixer.states)
    return {
        "tokens of the prompt": vectors,
        "vectors": vectors,
        "KV bytes a vector": kept,
        "KV bytes of the picture": vectors * kept,
        "tower, GFLOP": tower_flops(spec.tower) / 1e9,
        "the picture in the decoder, once, GFLOP": (2 * each * vectors + 2 * queries * vectors**2) / 1e9,
        "the prompt's text looks at it, GFLOP": 4 * queries * vectors * text / 1e9,
        "a written token looks at it, GFLOP": 4 * queries * vectors / 1e9,
    }


def crossed(spec: ModelSpec, tiles: int, text: int) -> dict[str, float]:
    """Return the costs of a picture of so many tiles that layers of cross attention see."""
    assert isinstance(spec.tower, TiledTowerSpec)
    vectors, layers = tiles * spec.tower.patches, [each for each in spec.layers if each.gated]
    mixers = [each.mixer for each in layers if isinstance(each.mixer, CrossAttentionSpec)]
    kept = sum(state.token_bytes(DTYPE) for mixer in mixers for state in mixer.states)
    stored = sum(2 * spec.hidden_size * 2 * mixer.attention.kv_size for mixer in mixers)
    queries = sum(mixer.attention.q_size for mixer in mixers)
    own = sum(p.inputs * p.outputs * p.used for layer in layers for p in layer.products(spec.hidden_size).values())
    token = 2 * own + 4 * queries * vectors
    return {
        "tokens of the prompt": 1,
        "vectors": vectors,
        "KV bytes a vector": kept,
        "KV bytes of the picture": vectors * kept,
        "tower, GFLOP": tower_flops(spec.tower) / 1e9,
        "the picture in the decoder, once, GFLOP": stored * vectors / 1e9,
        "the prompt's text looks at it, GFLOP": token * text / 1e9,
        "a written token looks at it, GFLOP": token / 1e9,
    }


def both_ways(tiles: int, text: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the costs in LLaVA-1.5-7B and in Llama-3.2-11B-Vision."""
    spec = model_config(json.loads(LLAVA.read_text(encoding="utf-8"))).spec
    return merged(spec, text), crossed(model_config(MLLAMA).spec, tiles, text)


def drawn(path: Path, text: int = 64) -> None:
    """Draw both ways, the second with one tile and with four."""
    one, four = (both_ways(tiles, text) for tiles in (1, 4))
    ways = {"merged tokens (LLaVA-1.5-7B)": one[0]}
    ways |= {f"cross attention (Llama-3.2-11B), {n}": each[1] for n, each in (("1 tile", one), ("4 tiles", four))}
    once, each_text, written = (
        "the picture in the decoder, once, GFLOP",
        "the prompt's text looks at it, GFLOP",
        "a written token looks at it, GFLOP",
    )
    work = {
        name: [(n, (own[once] + own[each_text] + n * own[written]) / 1e3) for n in WRITTEN]
        for name, own in ways.items()
    }
    kept = {name: [(n, n * own["KV bytes of the picture"] / 2**20) for n in (1, 2, 4, 8)] for name, own in ways.items()}
    panels = [
        Panel("TFLOP of a picture in the decoder", "tokens written", work, log_y=True),
        Panel("MiB of keys and values", "pictures", kept),
    ]
    path.write_text(picture(panels, "a picture among the tokens, and across"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", type=int, default=4, choices=range(1, 5))
    parser.add_argument("--text", type=int, default=64)
    parser.add_argument("--draw", type=Path)
    asked = parser.parse_args()
    if asked.draw is not None:
        drawn(asked.draw, asked.text)
    both = both_ways(asked.tiles, asked.text)
    print(f"| one picture, {asked.text} tokens of text | LLaVA-1.5-7B | Llama-3.2-11B-Vision, {asked.tiles} tiles |")
    print("|---|--:|--:|")
    for name in both[0]:
        print("|", name, "|", " | ".join(_spelled(each[name]) for each in both), "|")


def _spelled(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


if __name__ == "__main__":
    main()
