"""Checks of a model's files: opened as the loader opens them, then read value by value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import Source
from ridgeline.models.config import ModelConfig
from ridgeline.weights.checkpoint import PLAIN
from ridgeline.weights.head_files import drafting_layer
from ridgeline.weights.loader import (
    check_tied,
    checkpoint_views,
    empty_decoder,
    missing_offset,
    open_plain,
    read_model_config,
)
from ridgeline.weights.stored import StoredTensor

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class OpenTensor:
    """One of a checkpoint's tensors. `theirs` is its form in the files, and `ours` its form in a folder of its
    architecture.

    `part` is the part of a parameter that it fills, without memory. `offset` is what a folder leaves out of it (see
    NormSpec.offset).
    """

    stored: StoredTensor
    theirs: Source
    ours: Source
    part: Tensor
    offset: float


@dataclass(frozen=True)
class OpenModel:
    """A model whose files are open. `drafting` are the tensors of its layer for multi-token prediction, if they are
    plain numbers. `copies` are tensors that nothing needs, such as a tied weight stored again."""

    path: Path
    config: ModelConfig
    tensors: list[OpenTensor]
    drafting: dict[str, StoredTensor]
    copies: dict[str, StoredTensor]


@dataclass
class Report:
    """The content of the files. `not_finite` maps a tensor to the number of its values that are NaN or infinite."""

    architecture: str
    tensors: int = 0
    parameters: int = 0
    stored_as: Counter[str] = field(default_factory=Counter)
    not_finite: dict[str, int] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)

    def note(self, name: str, stored: StoredTensor, values: Tensor) -> None:
        self.tensors += 1
        self.parameters += values.numel()
        self.stored_as[stored.dtype] += 1
        if count := count_not_finite(values):
            self.not_finite[name] = count

    def verdict(self, path: Path) -> None:
        """Raise ModelLoadError if a value is NaN or infinite."""
        if self.not_finite:
            first, count = next(iter(self.not_finite.items()))
            more = f", and {len(self.not_finite) - 1} more tensors hold such" if len(self.not_finite) > 1 else ""
            raise ModelLoadError(
                f"{path} holds {count} values that are NaN or infinite in {first}{more}; copy it again."
            )


def count_not_finite(values: Tensor, at_once: int = 1 << 20) -> int:
    """Return the number of NaN and infinite values. They are counted in pieces, because all at once would take several
    times the tensor's memory."""
    return sum(piece.numel() - int(piece.isfinite().sum()) for piece in values.reshape(-1).split(at_once))


@contextmanager
def open_model(path: Path) -> Iterator[OpenModel]:
    """Open a model. Raise ModelLoadError as the loader does: for files that are missing or damaged, and for tensors
    that are missing, extra or misshaped, or a tied weight that is stored again with other values."""
    config = read_model_config(path)
    decoder = empty_decoder(config.spec)
    with open_plain(path, config) as (weights, stored):
        check_tied(config.spec, weights, stored, path)
        views = checkpoint_views(decoder, weights)
        plain = {
            name: tuple(Source(name=each.name, stacked=each.stacked) for each in sources)
            for name, sources in config.weights.items()
        }
        parts = checkpoint_views(decoder, plain)
        # Of a layer's gate, up and down stacks, whose experts are asked for in turns
        read = lru_cache(maxsize=3)(lambda name: stored[name].read())
        tensors = [
            OpenTensor(
                tensor,
                theirs,
                ours,
                parts[ours.name].tensor,
                missing_offset(decoder, name, ours) if theirs.complete else 0.0,
            )
            for name, sources in config.weights.items()
            for ours, theirs, tensor in _pairs(sources, weights[name], stored, read)
        ]
        copies = {name: each for name, each in stored.items() if name not in views}
        drafting = drafting_layer(config.spec, copies)
        if any(each.dtype not in PLAIN for each in drafting.values()):
            drafting = {}
        copies = {name: each for name, each in copies.items() if name not in drafting}
        yield OpenModel(path, config, tensors, drafting, copies)


def _pairs(
    ours: Sequence[Source], theirs: Sequence[Source], stored: Mapping[str, StoredTensor], read: Read
) -> Iterator[tuple[Source, Source, StoredTensor]]:
    """Yield the tensors of our checkpoints with those of this one. One of theirs may hold what ours hold expert by
    expert, and its fused projections below one another."""
    if ours[0].stacked is theirs[0].stacked:
        yield from ((mine, other, stored[other.name]) for mine, other in zip(ours, theirs, strict=True))
        return
    parts = len(ours) // stored[theirs[0].name].shape[0]
    for number, mine in enumerate(ours):
        expert, part = divmod(number, parts)
        other = theirs[part * len(theirs) // parts]
        _, rows, *rest = stored[other.name].shape
        rows = rows * len(theirs) // parts
        within = slice(part * rows, (part + 1) * rows) if len(theirs) < parts else slice(None)
        one = StoredTensor(
            [rows, *rest], stored[other.name].dtype, partial(_of_stack, read, other.name, (expert, within))
        )
        yield mine, other, one


def _of_stack(read: Read, name: str, within: tuple[int, slice]) -> Tensor:
    return read(name)[within]
