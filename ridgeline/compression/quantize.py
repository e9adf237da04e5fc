"""A model folder quantized in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.compression.budget import choose_within
from ridgeline.compression.calibration import LENGTH, SEQUENCES, default_documents, sequences
from ridgeline.compression.schemes import MakeConfig
from ridgeline.compression.walk import Outcome, SchemeOfMatrix, quantize_decoder
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import resolve_model
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.loader import load_weights, read_model_config

Progress = Callable[[str, float], None]

logger = logging.getLogger(__name__)

# A CPU's own products of codes also round activations, which is no part of the schemes
_EXACT = {"coded_linear": "torch"}


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A model after quantization.

    folder: of the model that it was made from.
    decoder: in float32, but for what is quantized; it multiplies as an engine would.
    dtype: of the files' other tensors.
    tokens_BS: the calibration text, if one was read.
    """

    folder: Path
    config: ModelConfig
    make: MakeConfig
    decoder: Decoder
    outcome: Outcome
    dtype: torch.dtype
    tokens_BS: Tensor | None

    @property
    def kept(self) -> list[str]:
        """The linear modules that stay as they are, in the checkpoint's words: routers and gates too."""
        ends = (".router", ".shared_gate.weight")
        routers = [sources[0].name for name, sources in self.config.weights.items() if name.endswith(ends)]
        return [name.removesuffix(".weight") for name in (*self.outcome.kept, *routers)]

    @property
    def bits_per_weight(self) -> float:
        """The mean over what is quantized, with scales."""
        made = self.outcome.made.values()
        return 8 * sum(each.nbytes for each in made) / max(1, sum(each.numel for each in made))


def quantized(
    model: str | Path,
    make: MakeConfig,
    *,
    documents: Sequence[str] | None = None,
    count: int = SEQUENCES,
    length: int | None = None,
    device: torch.device = torch.device("cpu"),
    progress: Progress = lambda what, fraction: None,
) -> QuantizedModel:
    """Return the model after quantization.

    documents: the calibration text; None: Python source of the standard library.
    count, length: of the sequences that it is cut into. Default: as many tokens as the context has, at most LENGTH.

    Raise InvalidConfig for what does not go together, and ModelLoadError for a model that cannot be read.
    """
    make.check()
    folder = resolve_model(model)
    check_source(folder)
    config, decoder = open_decoder(folder, device, progress)
    tokens_BS = None
    if make.calibrated:
        tokens_BS = _tokens(folder, config, documents, count, length)
    dtype = getattr(torch, config.dtype)
    scheme_of: SchemeOfMatrix | None = None
    if make.budget is not None:
        assert tokens_BS is not None
        chosen = choose_within(decoder, config, tokens_BS, make, dtype=dtype, progress=progress)
        scheme_of = lambda matrix: chosen.get(matrix.unit)  # noqa: E731
    outcome = quantize_decoder(
        decoder, config.weights, tokens_BS, make, dtype=dtype, progress=progress, scheme_of=scheme_of
    )
    if not outcome.made:
        raise InvalidConfig(f"nothing of {folder} is left to quantize; ignore fewer modules.")
    return QuantizedModel(
        folder=folder,
        config=config,
        make=make,
        decoder=decoder,
        outcome=outcome,
        dtype=dtype,
        tokens_BS=tokens_BS,
    )


def check_source(folder: Path) -> None:
    """Raise InvalidConfig for a model that is quantized already, or that is no folder."""
    if is_gguf(folder):
        raise InvalidConfig(f"{folder} is a GGUF file; write it as a folder first, with ridgeline convert.")
    found = read_json(folder / "config.json", required=True).get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise InvalidConfig(f"{folder} is quantized already ({method}); give the model that it was made from.")


def open_decoder(folder: Path, device: torch.device, progress: Progress) -> tuple[ModelConfig, Decoder]:
    """Return the model in float32. Raise ModelLoadError."""
    config = read_model_config(folder)
    if config.spec.layer_inputs is not None or any(layer.late_addend for layer in config.spec.layers):
        raise InvalidConfig(
            f"{folder} has layers that need more of others than their output; none can be run alone yet."
        )
    decoder = Decoder(config.spec, Ops(Platform.of(device), _EXACT), dtype=torch.float32, device=device)
    load_weights(decoder, folder, config.weights, progress=progress)
    decoder.requires_grad_(False)
    return config, decoder


def _tokens(
    folder: Path, config: ModelConfig, documents: Sequence[str] | None, count: int, length: int | None
) -> Tensor:
    context = config.spec.max_position_embeddings
    length = min(LENGTH, context) if length is None else length
    if length > context:
        raise InvalidConfig(f"sequences of {length} tokens exceed the model's context, {context}.")
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except ModelLoadError as error:
        raise InvalidConfig(f"calibration needs the model's tokenizer: {error}") from error
    bos = config.bos_token_id if config.bos_token_id is not None else tokenizer.bos_id
    tokens_BS = sequences(documents or default_documents(), tokenizer, count=count, length=length, bos=bos)
    if (largest := int(tokens_BS.max())) >= config.spec.vocab_size:
        raise InvalidConfig(
            f"the tokenizer of {folder} gives the id {largest}, and the model has {config.spec.vocab_size} tokens; "
            "one of them is not of this model."
        )
    return tokens_BS
