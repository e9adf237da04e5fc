"""A model folder as a decoder on the CPU, and its logits without a cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseStates
from ridgeline.models.config import ModelConfig
from ridgeline.weights.loader import load_weights, read_model_config

CPU = torch.device("cpu")
# Quantized weights are multiplied as they are: elsewhere a CPU also rounds activations, or widens weights
EXACT = dict.fromkeys(("coded_linear", "fp8_linear", "w8a8_linear"), "reference")
OPS = Ops(Platform(device_type="cpu"), EXACT)
REFERENCE_OPS = Ops(Platform(device_type="cpu"), dict.fromkeys(("linear", "rms_norm", "layer_norm"), "reference"))


def empty_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32, ops: Ops = OPS) -> Decoder:
    return Decoder(config.spec, ops, dtype=dtype, device=CPU)


def load(folder: Path, dtype: torch.dtype = torch.float32, ops: Ops = OPS) -> Decoder:
    config = read_model_config(folder)
    decoder = empty_decoder(config, dtype, ops)
    load_weights(decoder, folder, config.weights)
    return decoder


def dense_logits(decoder: Decoder, ids_BS: Tensor) -> Tensor:
    """[B, S, V] logits of every position of B sequences."""
    batch, length = ids_BS.shape
    positions_T = torch.arange(length).repeat(batch)
    states = DenseStates(decoder.spec, batch, length, decoder.embed.weight.dtype, CPU)
    hidden_TM = decoder(ids_BS.flatten(), positions_T, states)
    return decoder.logits(hidden_TM).unflatten(0, (batch, length))
