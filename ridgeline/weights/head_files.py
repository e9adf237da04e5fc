"""The files of heads that draft, and how these get their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.speculation import BLOCKS, MTP
from ridgeline.core.specs.draft_head import HeadConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.layers.draft_head import TargetsHead
from ridgeline.layers.medusa import Medusa
from ridgeline.models.draft_blocks import read_block_head
from ridgeline.models.draft_heads import mtp_head, read_head
from ridgeline.weights.checkpoint import PLAIN, open_checkpoint
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.loader import checkpoint_views, fill_randomly, missing_offset, shortened, together
from ridgeline.weights.rows import in_our_order
from ridgeline.weights.stored import StoredTensor

NARROW = "d2t"  # how far each token of a narrow vocabulary lies from its place in the whole one
WHOLE = ("I64", "I32")


def head_config(method: str, folder: Path, target: ModelSpec, *, files: bool) -> HeadConfig:
    """Return the head of a folder for a model, after a look at the names in its files. files: False where its numbers
    are made, so that it needs none. Raise ModelLoadError."""
    with _opened(folder, files) as stored:
        if method == MTP:
            head = mtp_head(target, stored)
        else:
            read = read_block_head if method in BLOCKS else read_head
            head = read(method, read_json(folder / "config.json", required=True), stored, target)
        weights = {name: together(sources, stored) for name, sources in head.weights.items()}
    return HeadConfig(spec=head.spec, weights=weights, unused=head.unused)


def drafting_layer(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint's layer for multi-token prediction, or {} if it holds none."""
    try:
        head = mtp_head(spec, stored)
    except ModelLoadError:
        return {}
    read = [source.name for sources in head.weights.values() for source in sources]
    begun = tuple(each for each in spec.unused if any(name.startswith(each) for name in read))
    return {name: tensor for name, tensor in stored.items() if name.startswith(begun)}


@contextmanager
def _opened(folder: Path, files: bool) -> Iterator[Mapping[str, StoredTensor]]:
    if not files:
        yield {}
        return
    with open_checkpoint(folder) as stored:
        yield stored


def check_head(head: TargetsHead | Medusa, config: HeadConfig, folder: Path) -> None:
    """Raise ModelLoadError unless the files hold the head's tensors and no others, in plain numbers. The head's own
    parameters are not touched, and may lie on a device that allocates nothing."""
    views = checkpoint_views(head, config.weights)
    with open_checkpoint(folder) as stored:
        if missing := [name for name in views if name not in stored]:
            raise ModelLoadError(f"{folder} lacks tensors of the head: {shortened(missing)}.")
        if extra := [name for name in stored if name not in views and not name.startswith(config.unused)]:
            raise ModelLoadError(f"{folder} holds tensors that the head has no place for: {shortened(extra)}.")
        odd = [
            f"{name} is {stored[name].shape} of {stored[name].dtype}, wanted {view.shape} of plain numbers"
            for name, view in views.items()
            if stored[name].shape != view.shape or stored[name].dtype not in PLAIN
        ]
        if odd:
            raise ModelLoadError(f"{folder} holds tensors of the head in another form: {shortened(odd)}.")
        if isinstance(head, TargetsHead) and head.tokens_U is not None:
            _narrow(stored[NARROW], len(head.tokens_U), head.target.spec.vocab_size)


def load_head(
    head: TargetsHead | Medusa, config: HeadConfig, folder: Path, *, load_format: str = "auto", seed: int = 0
) -> None:
    """Fill the head's parameters from its files, or with random numbers if load_format is "dummy". Raise ModelLoadError
    before any is touched if the files hold other tensors than they should."""
    if load_format == "dummy":
        generator = torch.Generator(next(head.parameters()).device).manual_seed(seed)
        fill_randomly(head, lambda _module, _device: generator)
        return
    check_head(head, config, folder)
    views = checkpoint_views(head, config.weights)
    with open_checkpoint(folder) as stored:
        if isinstance(head, TargetsHead) and head.tokens_U is not None:
            head.tokens_U.copy_(_narrow(stored[NARROW], len(head.tokens_U), head.target.spec.vocab_size))
        with torch.no_grad():
            for parameter, sources in config.weights.items():
                for source in sources:
                    view = views[source.name].tensor
                    view.copy_(in_our_order(stored[source.name].read().view(view.shape), source))
                if offset := missing_offset(head, parameter, sources[0]):
                    head.get_parameter(parameter).add_(offset)


def _narrow(stored: StoredTensor, scored: int, vocabulary: int) -> Tensor:
    """Return the tokens that the rows of a narrow output matrix score."""
    if stored.shape != [scored] or stored.dtype not in WHOLE:
        raise ModelLoadError(
            f"{NARROW} is {stored.shape} of {stored.dtype}, and the head scores {scored} tokens, each of which needs a "
            "whole number; copy the checkpoint again from its source."
        )
    found_U = torch.arange(scored) + stored.read().long()
    if bool((found_U < 0).any()) or bool((found_U >= vocabulary).any()):
        raise ModelLoadError(
            f"{NARROW} names tokens that the model's {vocabulary} are not among; take the head that was trained "
            "for this model."
        )
    return found_U
