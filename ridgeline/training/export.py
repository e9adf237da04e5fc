"""Conversion of a trained decoder to a Hugging Face model folder and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.training.objective import training_decoder
from ridgeline.training.tokenizer import save_tokenizer
from ridgeline.weights.loader import checkpoint_views, export_checkpoint, load_weights, read_model_config

# Without these a small model repeats itself: a mild penalty and some temperature keep it going.
SAMPLING = {"do_sample": True, "temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.1}


def write_model(folder: Path, decoder: Decoder, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and the weights in bfloat16, but for those that
    a bfloat16 model holds in float32 (a router's correction)."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_config(config)
    dtypes = checkpoint_views(training_decoder(model.spec, torch.bfloat16, torch.device("meta")), model.weights)
    tensors = export_checkpoint(decoder, model.weights)
    bf16 = {name: tensor.to("cpu", dtypes[name].tensor.dtype).contiguous() for name, tensor in tensors.items()}
    save_file(bf16, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")} | SAMPLING
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, config["max_position_embeddings"])


def read_model(folder: Path, device: torch.device) -> Decoder:
    """Return the decoder that a folder holds, in the folder's own dtype and with plain torch ops. Raise
    ModelLoadError."""
    config = read_model_config(folder)
    decoder = training_decoder(config.spec, getattr(torch, config.dtype), device)
    load_weights(decoder, folder, config.weights)
    return decoder
