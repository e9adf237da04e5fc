"""The draft model: where it comes from, whether it goes with the target, and its network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.assembly.forms import kept_forms
from ridgeline.core.config import LLMConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.kv_format import kv_format
from ridgeline.core.model_spec import ModelSpec
from ridgeline.core.speculation import DRAFT_MODEL, Speculation
from ridgeline.kernels.op import on_gpu
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.held import keeping
from ridgeline.quantization.scheme import Scheme, scheme
from ridgeline.weights.folder import EMBEDDED_DRAFT, EMBEDDED_MODEL
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.loader import (
    Progress,
    check_files,
    load_weights,
    read_model_config,
    resolve_model,
    stored_forms,
    with_cache,
)
from ridgeline.weights.quantized.config import method_name
from ridgeline.weights.quantized.plan import Forms


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """A draft model that goes with the target. scheme, forms: as in `Choices`, of its own weights."""

    folder: Path
    model: ModelConfig
    scheme: Scheme
    forms: Forms


def draft_folder(speculation: Speculation, config: LLMConfig, target: Path) -> Path:
    """Return the folder of the draft model, downloaded if need be. Raise InvalidConfig if none is named, and
    ModelLoadError if it is not there."""
    if speculation.model is not None:
        return resolve_model(speculation.model, download_dir=config.download_dir)
    if target.resolve() == EMBEDDED_MODEL.resolve():
        return EMBEDDED_DRAFT
    raise InvalidConfig(
        'speculative_config names no draft model, and only the embedded model ships with one; give "model", the '
        "folder or hub id of a smaller model with the same vocabulary."
    )


def choose_draft(
    config: LLMConfig, target: Path, model: ModelSpec, ops: Ops, weights: Scheme, longest: int
) -> DraftChoice | None:
    """Return the draft model of the config, or None if it names another method. Raise InvalidConfig or ModelLoadError
    for one that does not go with the target.

    weights: the scheme of the target's plain weights, which the draft model's take as well.
    longest: the tokens that a request may have.
    """
    speculation = config.speculation
    if speculation is None or speculation.method != DRAFT_MODEL:
        return None
    if on_gpu(ops.platform):
        raise InvalidConfig("draft models run on CPUs yet; on a GPU take the method ngram, or leave it out.")
    folder, files = draft_folder(speculation, config, target), config.load_format != "dummy"
    described = read_model_config(folder)
    check_draft(described.spec, model, longest)
    described = with_cache(folder, described, kv_format(config.kv_cache_dtype), files=files)
    if files:
        check_files(folder, described)
    return DraftChoice(
        folder=folder,
        model=described,
        scheme=weights if method_name(folder) is None and not is_gguf(folder) else scheme(None),
        forms=kept_forms(stored_forms(folder, described, files=files), config, folder, ops),
    )


def check_draft(draft: ModelSpec, target: ModelSpec, longest: int) -> None:
    """Raise InvalidConfig if a model cannot draft for another one in contexts of up to `longest` tokens."""
    if draft.pooling is not None:
        raise InvalidConfig("the draft model pools and writes nothing; name one that writes.")
    if draft.vocab_size != target.vocab_size:
        raise InvalidConfig(
            f"the draft model has a vocabulary of {draft.vocab_size:,} tokens, and the model one of "
            f"{target.vocab_size:,}; name a draft model with the same tokenizer."
        )
    if any(group.spec.exact for group in draft.cache_groups):
        raise InvalidConfig(
            "the draft model has recurrent layers, whose states cannot be taken back yet; name one without."
        )
    if draft.max_position_embeddings < longest:
        raise InvalidConfig(
            f"the draft model reads contexts of up to {draft.max_position_embeddings:,} tokens, and requests may have "
            f"{longest:,}; set max_model_len to {draft.max_position_embeddings}, or name another one."
        )


def load_draft(
    choice: DraftChoice,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    load_format: str,
    seed: int,
    progress: Progress | None,
) -> Decoder:
    """Return the draft model's network with its weights. positions: the tokens that a request may have. Raise
    ModelLoadError."""
    decoder = Decoder(
        choice.model.spec,
        ops,
        dtype=dtype,
        device=device,
        max_positions=positions,
        scheme_of=keeping(choice.forms, choice.scheme),
    )
    names = choice.model.weights
    load_weights(decoder, choice.folder, names, load_format=load_format, seed=seed, progress=progress)
    decoder.prepare()
    return decoder
