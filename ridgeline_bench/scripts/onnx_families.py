"""Small random models of many families as ONNX: the logits of each session beside transformers' and beside ours.

    pip install 'ridgeline[onnx]'
    python -m ridgeline_bench.scripts.onnx_families [--families llama gpt2] [--opsets 18 23] [--output results.jsonl]

transformers writes a model with random weights, ours reads it, `onnx_network.py` exports it with its key-value cache,
and ONNX Runtime runs the file at each level of its graph optimization: a prompt at once, then tokens one by one. Every
logit must be within 1e-4 of the largest of transformers' logits for the whole text, and of ours without a cache. The
program ends with 1 if one is not. `onnx_export --page` writes the table of docs/onnx.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.asked import OneOf, asked, keep, told
from ridgeline_bench.scripts.onnx_export import TOLERANCE, Work, of_network
from ridgeline_bench.scripts.onnx_network import export, open_network
from ridgeline_bench.scripts.onnx_sessions import LEVELS, Session, needed

_COMMON: Mapping[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"sliding_window": 8}  # tokens: shorter than the prompt
FAMILIES: Mapping[str, Mapping[str, Any]] = {  # transformers' name → what is not common
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "gemma3_text": {"head_dim": 32, **_WINDOW},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 112},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 112, "word_embed_proj_dim": 64},
    "cohere": {},
    "starcoder2": {},
    "stablelm": {},
    "glm": {"head_dim": 16},
    "falcon": {},
}
PROMPT = [5, 300, 17, 9, 22, 45, 77, 81, 100, 3, 7, 9]


def write(family: str, folder: Path, seed: int = 0) -> Any:
    """Write the folder of a random model, and return transformers' model of it. Norms and biases are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family]})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn_like(parameter)
            parameter.copy_(0.2 * drawn if parameter.dim() > 1 else parameter + 0.1 * drawn)
    model.save_pretrained(folder)
    return model


def lines(family: str, folder: Path, opsets: Sequence[int], levels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a line for each opset: nodes by level, and the largest differences of a level to transformers and ours."""
    theirs = write(family, folder)
    network = open_network(folder, len(PROMPT) + 4)
    for opset in opsets:
        file = folder / f"opset{opset}.onnx"
        export(network, file, opset)
        nodes, passes, errors, apart = {}, {}, [], []
        for level in levels:
            session = Session(file=file, level=level)
            spoken = session.speak(PROMPT, 4)
            with torch.no_grad():
                want = theirs(torch.tensor([[*PROMPT, *spoken.tokens[:-1]]])).logits[0, len(PROMPT) - 1 :].numpy()
            ours = of_network(network, Work(PROMPT, 4, 1), spoken.tokens)
            errors.append(float(np.abs(spoken.logits - want).max() / np.abs(want).max()))
            apart.append(float(np.abs(spoken.logits - ours).max() / np.abs(ours).max()))
            nodes[level], passes[level] = session.nodes, session.passes
        yield {
            "workload": "onnx family", "model": family, "opset": opset, "version": needed("onnxruntime").__version__,
            "nodes": nodes, "passes": passes, "error": max(errors), "error_to_ours": max(apart),
        }  # fmt: skip


def main() -> None:
    a = asked(
        __doc__, families=([OneOf(tuple(FAMILIES))], "of transformers"), opsets=[18, 23],
        output=(Path, "the file of results"),
    )  # fmt: skip
    wrong = 0
    with told():
        for family in a.families:
            needed("onnxscript"), needed("onnx"), needed("onnxruntime")
            with tempfile.TemporaryDirectory() as made:
                try:
                    for line in lines(family, Path(made), a.opsets, list(LEVELS)):
                        off = max(line["error"], line["error_to_ours"])
                        wrong += off > TOLERANCE
                        counts = " ".join(str(sum(each.values())) for each in line["nodes"].values())
                        print(f"{family:12} opset {line['opset']}  nodes {counts}  off by {off:.1e}", flush=True)
                        keep(a.output, line)
                except InvalidConfig as error:
                    raise InvalidConfig(f"{family}: {error}") from error
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
