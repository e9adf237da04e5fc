"""The effect of a change (a data type, a compression, a kernel) on a model's predictions, position by position.

Both models read the same windows. At each scored position both give the log-probabilities of their `top` likeliest
tokens and of the token that stands in the text. Tokens known to both are outcomes of their own, and all others are one
outcome together. So the Kullback-Leibler divergence KL(baseline ‖ candidate) over these outcomes is at most that over
the whole vocabulary, and equal to it if `top` reaches the vocabulary's size (Cover and Thomas, Elements of Information
Theory, 2.7: the log sum inequality). `covered` is the share of the baseline's probability that the outcomes of their
own hold; near 1 the bound is tight.

Legend:
    N  positions scored
    L  likeliest tokens reported
    K  outcomes of their own at most, L + 1
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import MAX_LOGPROBS
from ridgeline.llm import LLM
from ridgeline.progress import TokenBar
from ridgeline.text.outputs import TokenIdLogprobs
from ridgeline_bench.quality.documents import TextFile
from ridgeline_bench.quality.likelihood import Cut
from ridgeline_bench.quality.perplexity import Reading, TextScore, perplexity
from ridgeline_bench.quality.results import base, figures
from ridgeline_bench.results import Record

FLOOR = 1e-7  # least probability of the others: anything below is float32's rounding
AT_ONCE = 4096  # positions compared at once, which takes N L² comparisons


@dataclass(frozen=True)
class Predictions:
    """The output of one model at N positions: for the text's token, and for the likeliest ones, the likeliest first."""

    token_N: np.ndarray
    logprob_N: np.ndarray
    top_ids_NL: np.ndarray
    top_logprobs_NL: np.ndarray

    @classmethod
    def of(cls, tokens: Sequence[int], entries: Sequence[TokenIdLogprobs], top: int) -> Predictions:
        likeliest = [list(entry.items())[:top] for entry in entries]
        return cls(
            np.array(tokens, np.int32),
            np.array([entry[token].logprob for token, entry in zip(tokens, entries, strict=True)], np.float32),
            np.array([[token for token, _ in each] for each in likeliest], np.int32),
            np.array([[said.logprob for _, said in each] for each in likeliest], np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        return cls(*(np.concatenate(arrays) for arrays in zip(*(vars(part).values() for part in parts), strict=True)))

    def part(self, start: int) -> Predictions:
        return Predictions(*(array[start : start + AT_ONCE] for array in vars(self).values()))


@dataclass(frozen=True)
class Divergence:
    """The divergence at N positions. `kl_N` is a lower bound in nats, `covered_N` the baseline's probability of the
    outcomes of their own, and `greedy_N` is True where both models hold the same token likeliest."""

    kl_N: np.ndarray
    covered_N: np.ndarray
    greedy_N: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Divergence]) -> Divergence:
        return cls(*(np.concatenate(arrays) for arrays in zip(*(vars(part).values() for part in parts), strict=True)))

    @classmethod
    def between(cls, baseline: Predictions, candidate: Predictions) -> Divergence:
        starts = range(0, len(baseline.token_N), AT_ONCE)
        return cls.joined([_divergence(baseline.part(start), candidate.part(start)) for start in starts])

    def as_dict(self) -> dict[str, float]:
        return {
            "kl_mean": float(self.kl_N.mean()),
            "kl_p99": float(np.quantile(self.kl_N, 0.99)),
            "kl_max": float(self.kl_N.max()),
            "equal_greedy": float(self.greedy_N.mean()),
            "covered": float(self.covered_N.mean()),
        }


def _divergence(p: Predictions, q: Predictions) -> Divergence:
    equal_NLL = p.top_ids_NL[:, :, None] == q.top_ids_NL[:, None, :]
    shared_NL = equal_NLL.any(-1)
    q_logprobs_NL = np.take_along_axis(q.top_logprobs_NL, equal_NLL.argmax(-1), 1)
    # the text's token, where it is not among them
    own_N1 = ~(shared_NL & (p.top_ids_NL == p.token_N[:, None])).any(-1, keepdims=True)
    known_NK = np.concatenate([shared_NL, own_N1], 1)
    p_NK = np.concatenate([p.top_logprobs_NL, p.logprob_N[:, None]], 1).astype(np.float64)
    q_NK = np.concatenate([q_logprobs_NL, q.logprob_N[:, None]], 1).astype(np.float64)
    p_mass_NK = np.where(known_NK, np.exp(p_NK), 0)
    with np.errstate(invalid="ignore"):  # both tokens may be impossible
        kl_NK = np.where(p_mass_NK > 0, p_mass_NK * (p_NK - q_NK), 0)
    covered_N = p_mass_NK.sum(1)
    p_rest_N = np.maximum(FLOOR, 1 - covered_N)
    q_rest_N = np.maximum(FLOOR, 1 - np.where(known_NK, np.exp(q_NK), 0).sum(1))
    kl_N = kl_NK.sum(1) + p_rest_N * np.log(p_rest_N / q_rest_N)
    return Divergence(np.maximum(0, kl_N), covered_N, p.top_ids_NL[:, 0] == q.top_ids_NL[:, 0])


@dataclass(frozen=True)
class Comparison:
    """The comparison of one file, or of all together."""

    baseline: TextScore
    candidate: TextScore
    divergence: Divergence

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.baseline.name,
            "tokens": self.baseline.num_tokens,
            "baseline": self.baseline.as_dict(),
            "candidate": self.candidate.as_dict(),
            **self.divergence.as_dict(),
        }


@dataclass(frozen=True)
class Side:
    """The output of one model on all files. `record` holds what its figures have in common."""

    cut: Cut
    readings: list[Reading]
    scores: list[TextScore]
    predictions: list[Predictions]
    record: Record


def compare(
    files: Sequence[TextFile],
    baseline: Mapping[str, Any],
    candidate: Mapping[str, Any],
    *,
    window: int | None = None,
    stride: int | None = None,
    top: int = MAX_LOGPROBS,
) -> tuple[list[Comparison], list[Record]]:
    """Return the comparison of every file, then of all together if there are several; and the same as records.

    `baseline` and `candidate` are arguments of LLM. One is loaded after the other, so memory need hold only one. The
    output of the first (8 bytes for each of `top` tokens at every position) waits in the host's memory. Raise
    InvalidConfig if the two cut the text into different tokens.
    """
    first = _read("baseline", baseline, files, window, stride, top)
    second = _read("candidate", candidate, files, first.cut.window, first.cut.stride, top)
    for ours, theirs in zip(first.readings, second.readings, strict=True):
        if ours.documents != theirs.documents:
            raise InvalidConfig(
                f"baseline and candidate cut {ours.file.path} into different tokens, so their predictions cannot be "
                "compared one by one; `eval perplexity` compares bits per byte."
            )
    pairs = list(zip(first.scores, second.scores, first.predictions, second.predictions, strict=True))
    found = [Comparison(a, b, Divergence.between(p, q)) for a, b, p, q in pairs]
    if len(found) > 1:
        divergence = Divergence.joined([each.divergence for each in found])
        found.append(Comparison(TextScore.together(first.scores), TextScore.together(second.scores), divergence))
    options = {"baseline": dict(baseline), "candidate": dict(candidate), **vars(first.cut), "top": top}
    return found, [line for each in found for line in _lines(each, replace(second.record, options=options))]


def _read(
    what: str, options: Mapping[str, Any], files: Sequence[TextFile], window: int | None, stride: int | None, top: int
) -> Side:
    with LLM(**options) as llm:
        cut = Cut.of(llm, window, stride)
        readings = [Reading.of(llm, file, cut) for file in files]
        with TokenBar(what, sum(reading.num_tokens for reading in readings)) as bar:
            scores, predictions = zip(*(_predict(llm, reading, top, bar) for reading in readings), strict=True)
        side = Side(cut, readings, list(scores), list(predictions), base(llm))
    del llm
    gc.collect()
    torch.cuda.empty_cache()  # the next engine sizes its cache by what is free
    return side


def _predict(llm: LLM, reading: Reading, top: int, bar: TokenBar) -> tuple[TextScore, Predictions]:
    parts = []

    def seen(tokens: Sequence[int], entries: Sequence[TokenIdLogprobs]) -> None:
        parts.append(Predictions.of(tokens, entries, min(top, llm.assembly.model.spec.vocab_size)))
        bar(len(tokens))

    score = perplexity(llm, reading, top=top, seen=seen)
    return score, Predictions.joined(parts)


def _lines(comparison: Comparison, base: Record) -> list[Record]:
    """Return the records. Figures of different changes must not be mixed up, so the workload names file and change."""
    sides = (_named(base.options["baseline"]), _named(base.options["candidate"]))
    found, a, b = comparison.divergence.as_dict(), comparison.baseline, comparison.candidate
    return figures(
        replace(base, options={**base.options, "tokens": a.num_tokens, "bytes": a.num_bytes}),
        f"quality:{Path(a.name).name}:{sides[0]}>{sides[1]}",
        {
            "perplexity_baseline": (a.perplexity, "per token", "lower"),
            "perplexity": (b.perplexity, "per token", "lower"),
            "bits_per_byte_baseline": (a.bits_per_byte, "bits/byte", "lower"),
            "bits_per_byte": (b.bits_per_byte, "bits/byte", "lower"),
            "kl_mean": (found["kl_mean"], "nats", "lower"),
            "kl_p99": (found["kl_p99"], "nats", "lower"),
            "kl_max": (found["kl_max"], "nats", "lower"),
            "equal_greedy": (found["equal_greedy"], "share", "higher"),
            "covered": (found["covered"], "share", "higher"),
        },
    )


def _named(options: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(options.items()) if name != "model") or "default"
