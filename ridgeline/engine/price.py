"""The price of work in predicted milliseconds: the unit in which policies count service.

The cost model gives the least time of a whole step. A policy needs the part of one request, in a few operations a
step. So the model is asked about four steps once, and its answers become four prices: of a row that decodes, of a
cached token that such a row reads, of a prompt's token, and of a pair of prompt tokens in attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ridgeline.core.plan.step import RowKind, Rows
from ridgeline.core.settings.config import EngineConfig
from ridgeline.kernels.base.cost import CostModel, StepShape

LEAST = 1e-6  # milliseconds, of a token: nothing is free
USUAL_LENGTH = 1024  # cached tokens of the decoding rows that the model is asked about


class Price(NamedTuple):
    """Predicted milliseconds. row: of a decoding row. cached: of each token that it reads. token: of a prompt's token,
    or an encoder input's. pair: of each earlier token that it attends to. Without a cost model a token is a
    millisecond."""

    row: float = 1.0
    cached: float = 0.0
    token: float = 1.0
    pair: float = 0.0

    def prompt(self, tokens: int, start: int = 0) -> float:
        """Return the price of so many tokens of a prompt, behind `start` others."""
        return tokens * (self.token + self.pair * (start + tokens / 2))

    def output(self, start: int, tokens: int) -> float:
        """Return the price of an output behind `start` tokens."""
        return tokens * (self.row + self.cached * (start + tokens / 2))

    def of_rows(self, rows: Rows, kv_len_R: np.ndarray) -> np.ndarray:
        """Return the price of each row of a step, float64 [R]. kv_len_R: its cached tokens after the step."""
        decodes_R = self.row + self.cached * kv_len_R
        if rows.tokens_each == 1 and not (rows.kinds_R == RowKind.CHUNK).any():
            return decodes_R
        tokens_R = rows.num_tokens_R
        chunks_R = tokens_R * (self.token + self.pair * (kv_len_R - tokens_R / 2))
        if rows.encoded_R is not None:
            chunks_R = chunks_R + rows.encoded_R * (self.token + self.pair * rows.encoded_R / 2)
        return np.where(rows.kinds_R == RowKind.CHUNK, chunks_R, decodes_R + self.token * (tokens_R - 1))


def price_of(model: CostModel | None, config: EngineConfig) -> Price:
    """Return the prices of an engine, from the steps that its cost model predicts."""
    if model is None:
        return Price()
    rows, length = max(1, config.max_num_seqs // 2), min(USUAL_LENGTH, config.max_model_len)
    tokens = min(config.max_num_batched_tokens, config.max_model_len)

    def milliseconds(count: int, each: int, kv_len: int) -> float:
        return 1e3 * model.step_limit(StepShape(np.full(count, each), np.full(count, kv_len), count))

    def encoding(tokens: int) -> float:
        shape = StepShape([1], [1], 1, encoded=[tokens])
        return 1e3 * (model.step_limit(shape) - model.step_limit(shape._replace(encoded=())))

    short, long = milliseconds(rows, 1, length) / rows, milliseconds(rows, 1, 2 * length) / rows
    cached = max(0.0, long - short) / length
    if config.encodes:  # n tokens take a + n · token + n² / 2 · pair
        half = max(1, config.encodes // 2)
        first, tokens = encoding(2 * half), 2 * half
        pair = max(0.0, first - 2 * encoding(half)) / half**2
    else:
        first, later = milliseconds(1, tokens, tokens), milliseconds(1, tokens, 2 * tokens)
        pair = max(0.0, later - first) / tokens**2
    return Price(
        row=max(LEAST, short - cached * length),
        cached=cached,
        token=max(LEAST, first / tokens - pair * tokens / 2),
        pair=pair,
    )
