"""The part of a model that a run of fine-tuning trains, and its files in the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.training.base import Method, opened
from ridgeline.training.ia3 import Ia3
from ridgeline.training.lora import Lora, LoraConfig
from ridgeline.training.objective import training_decoder
from ridgeline.training.reward_models import begin_head
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.loader import checkpoint_views, export_checkpoint
from ridgeline.weights.quantized.config import method_name

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")  # files not copied


@dataclass(frozen=True)
class Base:
    """The model that a run begins with.

    folder: its folder. model: its config. held: the same with the weights that the folder has, all unless a reward
        model's map is new. entries: those of config.json that are written otherwise.
    """

    folder: Path
    model: ModelConfig
    held: ModelConfig
    entries: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return is_quantized(self.folder)


def is_quantized(folder: Path) -> bool:
    """Return True for a folder or file of weights that are not plain numbers."""
    return is_gguf(folder) or method_name(folder) is not None


class WeightLearner:
    """A decoder with its weights, and what of it learns: `learnt`, the parameters of which are in checkpoints."""

    def __init__(
        self, base: Base, method: Method, lora: LoraConfig, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.base, self.method, model = base, method, base.model
        self.decoder = opened(base.folder, base.held, method, dtype, device, quantized=base.quantized)
        torch.manual_seed(seed)
        self.learnt: nn.Module = self.decoder
        if method == "ia3":
            self.learnt = Ia3(self.decoder, model, lora.targets)
        elif method != "full":
            self.learnt = Lora(self.decoder, model, lora, seed)
        self.head: nn.Module | None = None
        if model.spec.pooling is not None:
            self.head = begin_head(self.decoder, new=base.held is not model, seed=seed)
            if self.learnt is not self.decoder:
                self.learnt.add_module("head", self.head)
        self.autocast = dtype if method == "full" and dtype != torch.float32 else None

    @property
    def trained(self) -> int:
        """The numbers that learn."""
        return sum(each.numel() for each in self.learnt.parameters() if each.requires_grad)

    def write(self, out: Path, name: str) -> Path:
        """Write an adapter, or a model's folder, and return its place. name: the base's, for the adapter."""
        base = self.base
        if self.head is None and isinstance(self.learnt, Lora | Ia3):
            self.learnt.export(out / "adapter", name)
            return out / "adapter"
        decoder = self.decoder
        if isinstance(self.learnt, Lora) and self.head is not None:  # in the numbers that the folder has
            decoder = opened(base.folder, base.held, "lora", getattr(torch, base.model.dtype), torch.device("cpu"))
            self.learnt.add_to(decoder)
            decoder.head.float().load_state_dict(self.head.state_dict())
        write_tuned(out / "model", decoder, base.model, base.folder, base.entries)
        return out / "model"


def check_method(base: Base, method: Method) -> None:
    """Raise InvalidConfig for a method that does not go with the model."""
    if method == "full" and base.quantized:
        raise InvalidConfig(
            f"{base.folder} holds quantized weights, which --method full cannot write; train an adapter with "
            "--method lora, or give the model as it was before."
        )
    if base.model.spec.pooling is None:
        return
    if method == "ia3" or base.quantized:
        what = "--method ia3" if method == "ia3" else "quantized weights"
        raise InvalidConfig(
            f"a reward model is written whole, which goes not with {what}; use a plain folder and --method lora."
        )


def write_tuned(
    folder: Path, decoder: Decoder, model: ModelConfig, source: Path, entries: Mapping[str, Any] | None = None
) -> None:
    """Write all weights, in the dtypes of the model that they began as, and copy that model's other files. entries:
    of config.json, in place of the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = training_decoder(model.spec, getattr(torch, model.dtype), torch.device("meta"))
    views = checkpoint_views(meta, model.weights)
    tensors = export_checkpoint(decoder, model.weights)
    rounded = {name: each.to("cpu", views[name].tensor.dtype).contiguous() for name, each in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.suffix not in (".md", ".png"):
            shutil.copyfile(file, folder / file.name)
    if entries:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **entries}, indent=2) + "\n")
