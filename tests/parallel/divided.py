"""Models that are divided between ranks: loaded, and their numbers and scores."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import part_of
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import dense_states
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.parallel.mesh import Mesh
from ridgeline.quantization.held import dequantized, keeping
from ridgeline.quantization.scheme import scheme
from ridgeline.weights.loader import load_weights, read_model_config, stored_forms
from tests.weights.loading import OPS as EXACT_OPS

OPS = Ops(Platform(device_type="cpu"))
CPU = torch.device("cpu")
TOKENS = torch.arange(5, 29)


def loaded(folder: Path, mesh: Mesh) -> Decoder:
    model = read_model_config(folder)
    decoder = Decoder(model.spec, OPS, dtype=torch.float32, device=CPU, max_positions=64, mesh=mesh)
    load_weights(decoder, folder, model.weights)
    decoder.prepare()
    return decoder


@torch.inference_mode()
def logits(folder: Path, mesh: Mesh) -> Tensor:
    decoder = loaded(folder, mesh)
    states = dense_states(decoder.spec, 1, len(TOKENS), torch.float32, CPU)
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), states))


def divides(folder: Path, tp: int, *, whole_experts: bool = False) -> bool:
    try:
        part_of(read_model_config(folder).spec, tp, whole_experts=whole_experts)
    except InvalidConfig:
        return False
    return True


def kept(folder: Path, mesh: Mesh) -> Decoder:
    """A model whose weights keep the form of the files."""
    model = read_model_config(folder)
    decoder = Decoder(
        model.spec,
        EXACT_OPS,
        dtype=torch.float32,
        device=CPU,
        max_positions=64,
        scheme_of=keeping(stored_forms(folder, model), scheme(None)),
        mesh=mesh,
    )
    load_weights(decoder, folder, model.weights)
    return decoder


def numbers_of(module: Linear | ExpertStack) -> Tensor:
    forms = [(each.held, each.tensors) for each in module.fillings]
    return torch.cat([dequantized(held, tensors) if held else tensors["weight_OI"] for held, tensors in forms], -2)
