"""The network that drafts, a model or a head: where it comes from, whether it goes with the target, and its weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch

from ridgeline.assembly.forms import kept_forms
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.speculation import BARE, DRAFT_MODEL, HEADS, MTP, NAMED, Speculation
from ridgeline.core.specs.draft_head import DraftBlockSpec, HeadConfig, HeadSpec, MedusaSpec, size_of
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.held import keeping
from ridgeline.quantization.scheme import Scheme, scheme
from ridgeline.weights.folder import EMBEDDED_DRAFTS, EMBEDDED_MODEL
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.head_files import check_head, head_config, load_head
from ridgeline.weights.loader import (
    Progress,
    check_files,
    empty_decoder,
    load_weights,
    read_model_config,
    resolve_model,
    stored_forms,
    with_cache,
)
from ridgeline.weights.quantized.config import method_name
from ridgeline.weights.quantized.plan import Forms
from ridgeline.worker.memory import weight_bytes
from ridgeline.worker.speculation.methods import Network, network_of


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """A draft model that goes with the target. scheme, forms: as in `Choices`, of its own weights."""

    folder: Path
    model: ModelConfig
    scheme: Scheme
    forms: Forms
    what: ClassVar[str] = "the draft model"
    reads: ClassVar[int] = 1

    @property
    def spec(self) -> ModelSpec:
        """The model by which the memory of cache and steps is planned."""
        return self.model.spec

    @property
    def network(self) -> ModelSpec:
        return self.model.spec

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Return the least memory that the weights take."""
        return weight_bytes(self.spec, dtype_bytes=dtype_bytes, positions=1, forms=self.forms.values())


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """A head that goes with the target. spec: the model by which the memory of cache and steps is planned. numbers: how
    many its weights are. reads: as `draft_reads` of `worker.memory.parts_of`."""

    folder: Path
    head: HeadConfig
    spec: ModelSpec
    numbers: int
    forms: Forms = field(default_factory=dict)
    scheme: Scheme = field(default_factory=lambda: scheme(None))
    what: ClassVar[str] = "the head"

    @property
    def network(self) -> HeadSpec:
        return self.head.spec

    @property
    def reads(self) -> int:
        spec = self.head.spec
        return 1 if isinstance(spec, MedusaSpec) else max(1, len(spec.taps))

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Return the memory that the weights take."""
        return self.numbers * dtype_bytes


def draft_folder(speculation: Speculation, config: LLMConfig, target: Path) -> Path:
    """Return the folder of the draft model or head, downloaded if need be. Raise InvalidConfig if none is named, and
    ModelLoadError if it is not there."""
    if speculation.method == MTP:
        return target
    if speculation.model is not None:
        return resolve_model(speculation.model, download_dir=config.download_dir)
    if target.resolve() == EMBEDDED_MODEL.resolve() and speculation.method in EMBEDDED_DRAFTS:
        return EMBEDDED_DRAFTS[speculation.method]
    what = "draft model" if speculation.method == DRAFT_MODEL else f"head for the method {speculation.method}"
    like = "a smaller model with the same vocabulary" if speculation.method == DRAFT_MODEL else "one trained for it"
    raise InvalidConfig(
        f'speculative_config names no {what}, and the model ships with none; give "model", the folder or hub id of '
        f"{like}."
    )


def naming_draft(config: LLMConfig, target: Path) -> LLMConfig:
    """Return the config with the folder of what drafts, if that ships with the target. So it is found where other
    weights take the target's place. Raise as `draft_folder` does."""
    speculation = config.speculation
    if speculation is None or speculation.method not in NAMED or speculation.model is not None:
        return config
    named = {**(config.speculative_config or {}), "model": str(draft_folder(speculation, config, target))}
    return replace(config, speculative_config=named)


def folders_read(config: LLMConfig) -> list[Path]:
    """Return the folders from which ranks load, whose settings name all of them."""
    named = [config.model, None if config.speculation is None else config.speculation.model]
    return [Path(folder) for folder in named if folder is not None]


def choose_draft(
    config: LLMConfig, target: Path, model: ModelSpec, ops: Ops, weights: Scheme, longest: int
) -> DraftChoice | HeadChoice | None:
    """Return the draft model or head of the config, or None if drafts come without one. Raise InvalidConfig or
    ModelLoadError for one that does not go with the target.

    weights: the scheme of the target's plain weights, which the draft model's take as well.
    longest: the tokens that a request may have.
    """
    speculation = config.speculation
    if speculation is None or speculation.method in BARE:
        return None
    folder, files = draft_folder(speculation, config, target), config.load_format != "dummy"
    if speculation.method in HEADS:
        return _choose_head(speculation, folder, model, config, ops, files)
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


def _choose_head(
    speculation: Speculation, folder: Path, model: ModelSpec, config: LLMConfig, ops: Ops, files: bool
) -> HeadChoice:
    """Return the head, after a look at the headers of its files: this comes before anything of its sizes is allocated,
    and before the model is loaded."""
    if is_gguf(folder):
        raise InvalidConfig("heads are read from folders with safetensors, and this is a GGUF file.")
    head = head_config(speculation.method, folder, model, files=files)
    if isinstance(head.spec, MedusaSpec) and speculation.depth > head.spec.heads:
        name = "num_speculative_tokens" if speculation.tree is None else "the depth of speculative_token_tree"
        raise InvalidConfig(
            f"{name} is {speculation.depth}, and the checkpoint has {head.spec.heads} heads of Medusa, each of "
            "which drafts one token; lower it."
        )
    if isinstance(head.spec, DraftBlockSpec) and speculation.depth > head.spec.most:
        raise InvalidConfig(
            f"num_speculative_tokens is {speculation.depth}, and the head was trained with blocks of {head.spec.block} "
            f"tokens, which hold {head.spec.most} drafts; lower it."
        )
    if speculation.confidence_threshold and getattr(head.spec, "confidence", None) is None:
        raise InvalidConfig(
            f"confidence_threshold is {speculation.confidence_threshold:g}, and the checkpoint has no confidence head, "
            "which DSpark's have; leave it out."
        )
    width = 0 if speculation.tree is None else speculation.tree.width
    scored = head.spec.scored or model.vocab_size
    if width > scored:
        raise InvalidConfig(
            f"the tree of speculative_config has {width} drafts behind one token, and the head knows {scored} tokens; "
            "make it narrower."
        )
    spec = size_of(head.spec, model).with_kv_format(kv_format(config.kv_cache_dtype))
    head = replace(head, spec=replace(head.spec, layers=spec.layers))
    plain, meta = keeping({}, scheme(None)), torch.device("meta")
    network = network_of(
        head.spec, empty_decoder(model), ops, dtype=torch.float32, device=meta, positions=1, scheme_of=plain
    )
    assert not isinstance(network, Decoder)
    if files:
        check_head(network, head, folder)
    numbers = sum(parameter.numel() for parameter in network.parameters())
    return HeadChoice(folder=folder, head=head, spec=spec, numbers=numbers)


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
    network: Network, choice: DraftChoice | HeadChoice, *, load_format: str, seed: int, progress: Progress | None
) -> None:
    """Load the weights of a network that drafts. Raise ModelLoadError."""
    if isinstance(choice, HeadChoice):
        assert not isinstance(network, Decoder)
        load_head(network, choice.head, choice.folder, load_format=load_format, seed=seed)
    else:
        assert isinstance(network, Decoder)
        names = choice.model.weights
        load_weights(network, choice.folder, names, load_format=load_format, seed=seed, progress=progress)
    network.prepare()
