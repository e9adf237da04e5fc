"""The model that fine-tuning begins with: in which numbers its weights are held, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Platform, on_gpu
from ridgeline.kernels.base.weight_format import CodedFormat, HeldMatrix
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.frozen import FrozenWeight
from ridgeline.quantization.held import joined, keeping
from ridgeline.quantization.scheme import scheme
from ridgeline.training.objective import training_ops
from ridgeline.weights.loader import empty_decoder, load_weights, stored_forms
from ridgeline.weights.quantized.plan import forms
from ridgeline.weights.quantized.rounded import rounded_pieces

Method = Literal["lora", "qlora", "ia3", "full"]
FUSED = ("linear", "norm_linear", "rms_norm", "gated_activation", "rope")  # have kernels with gradients


def opened(
    folder: Path,
    model: ModelConfig,
    method: Method,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantized: bool = False,
    load_format: str = "auto",
) -> Decoder:
    """Return a model's decoder, whose every op has a gradient, with its weights.

    method: "qlora" holds the matrices of layers in NF4 with double quantization, or in the form of a folder that is
        quantized already. "full" holds all in float32, the others in `dtype`.
    quantized: the folder has quantized weights.

    Raise InvalidConfig for a folder whose form has no gradients here, and ModelLoadError.
    """
    dtype = torch.float32 if method == "full" else dtype
    platform, kept, rounding = Platform.of(device), dict[str, HeldMatrix](), None
    if method == "qlora" and quantized:
        kept = {name: form for name, form in stored_forms(folder, model).items() if _in_codes(form)}
        if not kept:
            raise InvalidConfig(
                f"{folder} holds no weights in codes of a few bits that have gradients here; train it with "
                "--method lora, which holds them as plain numbers."
            )
    elif method == "qlora":
        rounding = partial(rounded_pieces, device=device)
        empty = empty_decoder(model.spec)
        kept = dict(forms(empty, model.weights, rounding(empty, model.weights)))
        if not kept:
            raise InvalidConfig("no layer of this model has inputs in groups of 64, as NF4 needs; use --method lora.")
    overrides = training_ops(platform) | {"coded_linear": "torch"}
    if on_gpu(platform):
        overrides |= dict.fromkeys(FUSED, "triton_training") | {"coded_linear": "triton", "embedding": "training"}
    decoder = Decoder(
        model.spec, Ops(platform, overrides=overrides), dtype=dtype, device=device,
        scheme_of=keeping(kept, scheme(None)),
    )  # fmt: skip
    load_weights(decoder, folder, model.weights, load_format=load_format, rounding=rounding)
    _freeze_codes(decoder)
    return decoder


def _in_codes(form: HeldMatrix) -> bool:
    """Return True for a matrix of a layer whose products have gradients."""
    formats = [held.format for held in form.helds if held is not None]
    return form.copies == 1 and not form.beside and all(isinstance(each, CodedFormat) for each in formats)


def _freeze_codes(decoder: Decoder) -> None:
    """Let weights in codes multiply with gradients of what they multiply."""
    for module in decoder.modules():
        if isinstance(module, Linear) and module.fillings:
            module.multiply_with(FrozenWeight(module.ops, joined(module.ops, module.fillings)))
            module.fillings = ()


def held_bytes(decoder: Decoder) -> Mapping[str, int]:
    """Return the bytes of a decoder's weights: those in codes, and plain ones."""
    codes = sum(each.prepared_bytes for each in decoder.modules() if isinstance(each, Linear))
    return {"codes": codes, "plain": sum(each.nbytes for each in decoder.parameters())}
