"""Tiny models of transformers' classes, with random weights, for the way in through its modules."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

WIDTH, HEADS, VOCAB, WINDOW, CONTEXT = 80, 4, 307, 8, 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


class Kind(NamedTuple):
    """A class of transformers, its config's class, and the sizes that the tests give it."""

    model: str
    config: str
    values: dict[str, Any]

    def built(self) -> Any:
        """Return the model in float32 with random weights, the same on every call."""
        config = getattr(transformers, self.config)(**self.values)
        model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
        generator = torch.Generator().manual_seed(sum(self.model.encode()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                norm = parameter.ndim == 1 and name.endswith("weight")
                parameter.normal_(float(norm), 0.2, generator=generator)
        return model.eval()


def kind(name: str, config: str = "", **changes: Any) -> Kind:
    """Return a class with the common sizes and these in their place; None leaves a size out."""
    return Kind(name, config or name.removesuffix("ForCausalLM") + "Config", {**COMMON, **changes})


HELIUM = kind("HeliumForCausalLM", head_dim=20)
CWM = kind("CwmForCausalLM", head_dim=20, sliding_window=WINDOW)  # a layer of four sees everything
LLAMA = kind("LlamaForCausalLM")


@cache
def oracle(of: str) -> Any:
    return {each.model: each for each in (HELIUM, CWM, LLAMA)}[of].built()


def saved(model: Any, folder: Path) -> Path:
    """Save a model, and return its folder."""
    model.save_pretrained(folder)
    return folder
