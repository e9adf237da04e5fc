"""The scheme of each unit under a budget of bytes, by measured sensitivity. A unit is a (fused) linear map, or the
experts of a layer.

Each unit is rounded to nearest by each scheme while all others stay as they are, and the divergence of the model's
predictions is measured: KL(before ‖ after), the mean over the tokens of a sample. Divergences are taken to add up,
which holds while they are small.

Then, from the most bits on, the unit that loses least for each byte it gives back takes its next scheme, until the
bytes are within the budget. This is the greedy solution of the multiple-choice knapsack (Sinha and Zoltners, Operations
Research 27(3), 1979). Schemes that are worse for more bytes, or that lie above the line between two others, are never
taken.

Legend:
    B  sequences
    S  tokens per sequence
    T  tokens
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ridgeline.compression.modules import Matrix, ignored, matrices
from ridgeline.compression.predictions import divergence
from ridgeline.compression.rounding import check_fits, grid_of, round_matrix
from ridgeline.compression.schemes import MakeConfig
from ridgeline.compression.walk import Run, prepared_owner, restored_owner
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models.config import ModelConfig

Progress = Callable[[str, float], None]
Choice = tuple[int, float]  # bytes, and what it costs

SAMPLE = 2048  # tokens on which a sensitivity is measured


@torch.no_grad()
def choose_within(
    decoder: Decoder,
    config: ModelConfig,
    tokens_BS: Tensor,
    make: MakeConfig,
    *,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, str]:
    """Return the scheme of each unit of matrices, by its name. Raise InvalidConfig if the budget is too small for the
    fewest bits."""
    assert make.budget is not None
    sample_BS = tokens_BS[: max(1, SAMPLE // tokens_BS.shape[1])]
    choices = sensitivities(decoder, config, sample_BS, make, dtype=dtype, progress=progress)
    quantizable = sum(m.weight_OI.numel() for m in _open(decoder, config, make))
    other = (sum(p.numel() for p in decoder.parameters()) - quantizable) * dtype.itemsize
    options = {unit: [each[scheme] for scheme in make.schemes] for unit, each in choices.items()}
    picked = knapsack(options, make.budget - other)
    if picked is None:
        least = other + sum(min(size for size, _ in each) for each in options.values())
        raise InvalidConfig(f"a budget of {make.budget:,} bytes is too small; the fewest bits take {least:,}.")
    return {unit: make.schemes[index] for unit, index in picked.items()}


def _open(decoder: Decoder, config: ModelConfig, make: MakeConfig) -> list[Matrix]:
    return [m for _, m in matrices(decoder, config.weights) if not ignored(m, make.ignore)]


def sensitivities(
    decoder: Decoder,
    config: ModelConfig,
    sample_BS: Tensor,
    make: MakeConfig,
    *,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, dict[str, Choice]]:
    """Return, for each unit of matrices and each scheme, its bytes and the divergence that it causes alone."""
    run, found = Run(decoder, sample_BS), _open(decoder, config, make)
    before: list[list[tuple[Tensor, Tensor | None]]] = []
    for index in range(len(decoder.layers)):
        before.append(list(run.batches))
        run.advance(index)
    plain_TV = _logprobs(run)
    measured: dict[str, dict[str, Choice]] = {}
    units = [list(same) for _, same in groupby(found, lambda m: m.unit)]
    for number, ours in enumerate(units):
        progress("measuring sensitivities", number / len(units))
        layer = int(ours[0].name.split(".")[1])
        measured[ours[0].unit] = choices = {}
        for scheme in make.schemes:
            size = _take(ours, scheme, make, dtype)
            run.batches = list(before[layer])
            for index in range(layer, len(decoder.layers)):
                run.advance(index)
            for _, same in groupby(ours, lambda m: m.owner):
                restored_owner(list(same))
            choices[scheme] = size, float(divergence(plain_TV, _logprobs(run)).mean())
    return measured


def _logprobs(run: Run) -> Tensor:
    return torch.cat([logits_TV.log_softmax(-1) for logits_TV in run.logits()])


def _take(ours: Sequence[Matrix], scheme: str, make: MakeConfig, dtype: torch.dtype) -> int:
    """Let the owners of these matrices multiply with what a scheme makes of them, and return its bytes."""
    size = 0
    for _, same in groupby(ours, lambda m: m.owner):
        own = list(same)
        for m in own:
            check_fits(m, grid_of(make, scheme, dtype), m.weight_OI.shape[1])
        made = [round_matrix(m, m.weight_OI, scheme, make, None, dtype) for m in own]
        prepared_owner(own, made)
        size += sum(each.nbytes for one in made for each in one.values())
    return size


def knapsack(options: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, int] | None:
    """Return by name the index of a choice, so that the bytes stay within the budget at little cost, or None if none
    do."""
    hulls = {name: _hull(choices) for name, choices in options.items()}
    place = {name: len(hull) - 1 for name, hull in hulls.items()}
    size = sum(options[name][hull[-1]][0] for name, hull in hulls.items())
    while size > budget:
        steps = []
        for name, at in place.items():
            if at:
                (less, worse), (more, better) = (options[name][hulls[name][i]] for i in (at - 1, at))
                steps.append(((worse - better) / (more - less), name, more - less))
        if not steps:
            return None
        _, name, saved = min(steps)
        place[name] -= 1
        size -= saved
    return {name: hulls[name][at] for name, at in place.items()}


def _hull(choices: Sequence[Choice]) -> list[int]:
    """Return the choices on the lower hull of cost over bytes, the smallest first."""
    kept: list[int] = []
    for index in sorted(range(len(choices)), key=lambda i: choices[i]):
        size, cost = choices[index]
        if kept and (choices[kept[-1]][1] <= cost or choices[kept[-1]][0] == size):
            continue
        while len(kept) > 1:
            (a, ca), (b, cb) = choices[kept[-2]], choices[kept[-1]]
            if (ca - cb) * (size - b) > (cb - cost) * (b - a):
                break
            kept.pop()
        kept.append(index)
    return kept
