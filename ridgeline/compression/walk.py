"""The way through a decoder, layer by layer: the calibration text is run through a layer, what its linear maps read is
measured, they are quantized, and their quantized outputs are what the next layer is calibrated with.

Memory holds the activations of one layer: [B, S, M] twice, and the Hessians of its matrices.

Legend:
    B  sequences
    S  tokens per sequence
    T  tokens run at once
    M  model width
    O  outputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from ridgeline.compression.folding import fold_layer
from ridgeline.compression.made import Made, ReorderedWeight
from ridgeline.compression.modules import Matrix, ignored, matrices, stacked, stored_rows
from ridgeline.compression.rounding import check_fits, grid_of, round_matrix
from ridgeline.compression.schemes import MakeConfig
from ridgeline.core.specs.model import WeightMap
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.layers.dense import DenseStates
from ridgeline.layers.experts import ExpertStack
from ridgeline.quantization.experts import ListedWeights, StackedWeights
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.quantization.make.statistics import InputStatistics, ObservedWeight
from ridgeline.quantization.weight import Weight, weight_of

Progress = Callable[[str, float], None]
SchemeOfMatrix = Callable[[Matrix], str | None]

TOKENS_AT_ONCE = 4096


@dataclass
class Outcome:
    """The result of a walk.

    made: the checkpoint's quantized modules, by name.
    kept: those that stay as they are.
    notes: what the user should know.
    """

    made: dict[str, Made] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@torch.no_grad()
def quantize_decoder(
    decoder: Decoder,
    weights: WeightMap,
    tokens_BS: Tensor | None,
    config: MakeConfig,
    *,
    dtype: torch.dtype,
    progress: Progress,
    scheme_of: SchemeOfMatrix | None = None,
) -> Outcome:
    """Quantize a float32 decoder where it stands.

    tokens_BS: the calibration text; None if the method needs none.
    dtype: that of the files.
    scheme_of: the scheme of each matrix; None keeps it. Default: the config's first for all.
    """
    choose = scheme_of or (lambda matrix: config.schemes[0])
    outcome, run = Outcome(), None if tokens_BS is None else Run(decoder, tokens_BS)
    _note_stacks(decoder, weights, outcome)
    layers = {
        index: [m for _, m in found] for index, found in groupby(matrices(decoder, weights), lambda each: each[0])
    }
    chosen = _chosen(layers, choose, config, outcome)
    for found in layers.values():  # so that nothing is found out after hours
        for m in found:
            if m.name in chosen:
                check_fits(m, grid_of(config, chosen[m.name], dtype), m.weight_OI.shape[1])
    last = max((index for index, found in layers.items() if any(m.name in chosen for m in found)), default=-1)
    for index, found in layers.items():
        if index > last:
            break
        progress("quantizing", index / len(layers))
        ours = [m for m in found if m.name in chosen]
        seen = run.observed(index, found) if run is not None and ours else {}
        if config.folding is not None and seen:
            grids = {m.name: grid_of(config, chosen[m.name], dtype) for m in ours}
            fold_layer(decoder.layers[index], found, seen, grids, config, dtype)
        _quantize_layer(ours, chosen, seen, config, dtype, outcome)
        if run is not None:
            run.advance(index)
    progress("quantizing", 1.0)
    return outcome


def _note_stacks(decoder: Decoder, weights: WeightMap, outcome: Outcome) -> None:
    if names := stacked(decoder, weights):
        outcome.kept += [weights[f"{name}.weight"][0].name for name in names]
        outcome.notes.append(
            f"the experts of {len(names) // 2} layers stay as they are: their files hold all experts in one tensor."
        )


def _chosen(
    layers: Mapping[int, Sequence[Matrix]], choose: SchemeOfMatrix, config: MakeConfig, outcome: Outcome
) -> dict[str, str]:
    """Return the scheme of each matrix to be quantized, by its name. The experts of a stack stay together."""
    found: dict[str, str] = {}
    for ours in layers.values():
        left = {id(m.owner) for m in ours if ignored(m, config.ignore)}
        for m in ours:
            scheme = None if id(m.owner) in left else choose(m)
            if scheme is None:
                outcome.kept += m.stored_names
            else:
                found[m.name] = scheme
    return found


def _quantize_layer(
    found: Sequence[Matrix],
    chosen: Mapping[str, str],
    seen: Mapping[str, InputStatistics],
    config: MakeConfig,
    dtype: torch.dtype,
    outcome: Outcome,
) -> None:
    poor: list[str] = []
    for owner, same in groupby(found, lambda m: m.owner):
        ours, prepared = list(same), []
        for m in ours:
            weight_OI, known = m.weight_OI.float(), seen.get(m.name)
            if known is not None and m.expert is not None and known.tokens < config.min_tokens * weight_OI.shape[1]:
                poor.append(m.stored_names[0])
                known = None
            prepared.append(round_matrix(m, weight_OI, chosen[m.name], config, known, dtype))
            outcome.made |= prepared[-1]
        prepared_owner(ours, prepared)
        owner.weight = None
    if poor and config.calibrated:
        outcome.notes.append(
            f"{len(poor)} matrices of experts saw too few tokens and were rounded to nearest, such as {poor[0]}."
        )


def prepared_owner(ours: Sequence[Matrix], made: Sequence[Mapping[str, Made]]) -> None:
    """Let the owner of these matrices, which are all of its own, multiply with what was made of them."""
    owner = ours[0].owner
    weights = [joined(m, list(each.values())) for m, each in zip(ours, made, strict=True)]
    if isinstance(owner, ExpertStack):
        owner.matrices = ListedWeights(weights, sum(owner.parts))
    else:
        owner.multiply_with(weights[0])


def restored_owner(ours: Sequence[Matrix]) -> None:
    """Let the owner of these matrices multiply with its loaded weight again."""
    owner = ours[0].owner
    assert owner.weight is not None
    if isinstance(owner, ExpertStack):
        owner.matrices = StackedWeights(owner.ops, owner.weight)
    else:
        owner.multiply_with(weight_of(owner.ops, owner.weight))


def joined(matrix: Matrix, made: Sequence[Made]) -> Weight:
    """Return the weight that takes the place of a matrix, with outputs in our order."""
    ops, weights = matrix.owner.ops, [each.weight(matrix.owner.ops) for each in made]
    rows = [stored_rows(source, count) for source, (_, count) in zip(matrix.sources, matrix.parts, strict=True)]
    starts = [sum(len(before) for before in rows[:index]) for index in range(len(rows))]
    stored_O = torch.cat([start + each for start, each in zip(starts, rows, strict=True)])
    plain = bool((stored_O == torch.arange(len(stored_O))).all())
    return JoinedWeight(ops, weights) if plain else ReorderedWeight(ops, weights, stored_O.argsort())


class Run:
    """The calibration text between two layers: what the next one is given, in batches."""

    def __init__(self, decoder: Decoder, tokens_BS: Tensor) -> None:
        self.decoder = decoder
        self.length = tokens_BS.shape[1]
        device = decoder.embed.weight.device
        self.batches: list[tuple[Tensor, Tensor | None]] = []
        for some_BS in tokens_BS.split(max(1, TOKENS_AT_ONCE // self.length)):
            ids_T = some_BS.flatten().to(device)
            self.batches.append((decoder.embedded(ids_T, self._positions(len(ids_T))), None))
        kept = any(layer.embedded for layer in decoder.spec.layers)
        self._embedded: list[Tensor | None] = [x_TM if kept else None for x_TM, _ in self.batches]

    def _positions(self, tokens: int) -> Tensor:
        device = self.decoder.embed.weight.device
        return torch.arange(self.length, device=device).repeat(tokens // self.length)

    def _outputs(self, index: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        spec = self.decoder.spec
        for (x_TM, residual_TM), embedded_TM in zip(self.batches, self._embedded, strict=True):
            state = DenseStates(spec, len(x_TM) // self.length, self.length, x_TM.dtype, x_TM.device)[index]
            yield self.decoder.layers[index](x_TM, residual_TM, self._positions(len(x_TM)), state, None, embedded_TM)

    def advance(self, index: int) -> None:
        """Run the text through a layer."""
        for place, after in enumerate(self._outputs(index)):
            self.batches[place] = after

    def observed(self, index: int, found: Sequence[Matrix]) -> dict[str, InputStatistics]:
        """Return the inputs of each matrix of a layer, by the matrix's name."""
        seen: dict[str, InputStatistics] = {}
        for owner, same in groupby(found, lambda m: m.owner):
            ours = [(m, ObservedWeight.of(m.owner.ops, m.weight_OI)) for m in same]
            seen |= {m.name: observed.seen for m, observed in ours}
            if isinstance(owner, ExpertStack):
                owner.matrices = ListedWeights([observed for _, observed in ours], sum(owner.parts))
            else:
                owner.multiply_with(ours[0][1])
        for _ in self._outputs(index):
            pass
        for _, same in groupby(found, lambda m: m.owner):
            restored_owner(list(same))
        return seen

    def logits(self) -> Iterator[Tensor]:
        """Yield the scores of each batch, once the text has passed all layers."""
        for x_TM, residual_TM in self.batches:
            yield self.decoder.logits(Hidden(x_TM, residual_TM))
