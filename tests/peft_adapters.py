"""Adapters that PEFT makes of tiny models, saved as it saves them: the oracle of tests with adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

from tests import tiny_models


class PeftAdapter:
    """An adapter of a family's tiny model. model: with the adapter. folder: as PEFT saved it."""

    def __init__(self, family: str, folder: Path, seed: int = 0, **options: Any) -> None:
        self._adapt(tiny_models.build(family), folder, seed, options)

    @classmethod
    def of(cls, model: Any, folder: Path, seed: int = 0, **options: Any) -> PeftAdapter:
        """Make one of any model of transformers."""
        made = cls.__new__(cls)
        made._adapt(model, folder, seed, options)
        return made

    def _adapt(self, model: Any, folder: Path, seed: int, options: dict[str, Any]) -> None:
        plain = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
        config = IA3Config(**options) if "feedforward_modules" in options else LoraConfig(**plain | options)
        self.folder = folder
        self.model: PeftModel = get_peft_model(model, config).eval()
        draw = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                    parameter.copy_(0.15 * torch.randn(parameter.shape, generator=draw))
                elif "magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=draw))
                elif parameter.requires_grad and name.endswith(
                    (".bias", "_delta.default", "modules_to_save.default.weight")
                ):
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
                elif "ia3_l" in name:
                    parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=draw))
        self.model.save_pretrained(str(folder))

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "adapter_config.json").read_text())

    def write_config(self, **changes: Any) -> None:
        (self.folder / "adapter_config.json").write_text(json.dumps({**self.config, **changes}))

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of all tokens behind each of these: [tokens, vocabulary]."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


class PlainModel:
    """The model itself, with the same interface."""

    def __init__(self, family: str) -> None:
        self.model = tiny_models.build(family)

    logprobs = PeftAdapter.logprobs


def save_random(model: Path, folder: Path, seed: int = 1) -> Path:
    """Save an adapter of random numbers of a model's folder, and return its folder."""
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules="all-linear"))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    adapted.save_pretrained(str(folder))
    return folder
