"""The share of a text that a mixture would have dropped if its experts had a capacity, by the routes really taken.

GShard and the Switch Transformer let each expert take at most ceil(factor · tokens · K / E) of a batch's tokens. Pairs
beyond that are not computed. Here nothing is dropped: each step's counts say what a capacity would have cost. A batch
is a step of the engine.

Legend:
    L  layers with experts
    E  experts
    K  experts of a token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.llm import LLM
from ridgeline.perf.experts import capacity, dropped, imbalance, utilization
from ridgeline.progress import TokenBar
from ridgeline_bench.quality.documents import TextFile

FACTORS = (1.0, 1.25, 1.5, 2.0)
TILE = 128  # rows of a tile of the products


@dataclass(frozen=True)
class LayerCapacity:
    """The load of one layer's experts over a text.

    imbalance: of all tokens together.
    filled: share of the rows of tiles of TILE rows that hold pairs, over all batches.
    dropped: capacity factor → share of pairs beyond the capacity.
    """

    layer: int
    pairs: int
    imbalance: float
    filled: float
    dropped: dict[float, float]


@dataclass(frozen=True)
class Capacity:
    """The layers of a model over a text of `tokens` tokens, which ran in `batches` batches."""

    tokens: int
    batches: int
    layers: list[LayerCapacity]

    def mean(self, factor: float) -> float:
        """Return the share of pairs beyond the capacity in all layers."""
        pairs = sum(layer.pairs for layer in self.layers)
        return sum(layer.dropped[factor] * layer.pairs for layer in self.layers) / pairs

    def as_dict(self) -> dict[str, Any]:
        factors = list(self.layers[0].dropped)
        layers = [
            {
                "layer": layer.layer,
                "imbalance": layer.imbalance,
                "filled_tiles": layer.filled,
                "dropped": {str(factor): share for factor, share in layer.dropped.items()},
            }
            for layer in self.layers
        ]
        together = {str(factor): self.mean(factor) for factor in factors}
        return {"tokens": self.tokens, "batches": self.batches, "layers": layers, "dropped": together}


def measure_capacity(
    llm: LLM, files: Sequence[TextFile], factors: Sequence[float] = FACTORS, window: int = 1024
) -> Capacity:
    """Read the texts in pieces of `window` tokens, and return what capacities would have dropped.

    Raise InvalidConfig for a model without experts, for texts without tokens, and for factors that are not above 0.
    """
    mixtures = [layer.feed_forward for layer in llm.assembly.model.spec.layers]
    specs = [spec for spec in mixtures if isinstance(spec, ExpertsSpec)]
    if not specs:
        raise InvalidConfig("the model has no experts, so nothing has a capacity; name a mixture of experts.")
    if wrong := [factor for factor in factors if not 0 < factor < float("inf")]:
        raise InvalidConfig(f"a capacity factor is {wrong[0]:g}; it must be above 0.")
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.encode(text, add_special_tokens=False) for file in files for text in file.documents]
    window = max(1, min(window, llm.engine.config.max_model_len - 1))
    pieces = [ids[start : start + window] for ids in texts for start in range(0, len(ids), window)]
    if not pieces:
        raise InvalidConfig("the model's tokenizer finds no tokens in these texts; name others.")
    looks: list[ExpertLoad] = []
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    at_once = max(1, 4 * llm.engine.config.max_num_batched_tokens // window)
    with llm.assembly.worker.watching_experts(looks.append), TokenBar("routing", sum(map(len, pieces))) as bar:
        for start in range(0, len(pieces), at_once):
            batch = pieces[start : start + at_once]
            llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
            bar(sum(map(len, batch)))
    return summed(specs, looks, factors)


def summed(specs: Sequence[ExpertsSpec], looks: Sequence[ExpertLoad], factors: Sequence[float]) -> Capacity:
    """Return the tokens that capacities would have dropped in the steps of these looks."""
    layers = []
    for index, spec in enumerate(specs):
        how, counts = spec.routing, [look.step_LE[index][: spec.routing.experts] for look in looks]
        pairs = int(sum(counts_E.sum() for counts_E in counts))
        rows = sum(counts_E.sum() / utilization(counts_E, TILE) for counts_E in counts)
        lost = {
            factor: sum(
                dropped(counts_E, capacity(factor, counts_E.sum() // how.top_k, how.experts, how.top_k))
                for counts_E in counts
            )
            for factor in factors
        }
        shares = {factor: pairs_lost / pairs for factor, pairs_lost in lost.items()}
        layers.append(LayerCapacity(looks[0].layers[index], pairs, imbalance(np.sum(counts, 0)), pairs / rows, shares))
    return Capacity(sum(look.step_tokens for look in looks), len(looks), layers)
