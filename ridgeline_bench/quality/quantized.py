"""The costs and gains of quantization: for each scheme and method the bits of a weight, the memory, the change of
predictions, and the speed.

Quality is measured in float32 (`dense`), so nothing but the quantization of weights, and of activations where the
scheme rounds them, is seen. Speed is that of the engine with the scheme, on the device at hand. A method changes a
scheme's numbers and not its kernel, so all methods of a scheme have one speed, and schemes without a kernel here have
none.

Legend:
    B  sequences
    S  tokens per sequence
    T  tokens of a window
    W  windows
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ridgeline.compression.modules import matrices
from ridgeline.compression.predictions import TokenCosts, logprobs
from ridgeline.compression.schemes import SCHEMES, MakeConfig
from ridgeline.compression.walk import Run, quantize_decoder
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import SamplingParams
from ridgeline.kernels.base.op import Platform
from ridgeline.layers.decoder import Decoder
from ridgeline.llm import LLM
from ridgeline.quantization import SCHEMES as SERVED
from ridgeline.quantization.make import aqlm, quip
from ridgeline.quantization.scheme import scheme as served_scheme
from ridgeline.training.aware import config_of
from ridgeline_bench.quality import k_quants
from ridgeline_bench.quality.dense import DenseModel

REFERENCES: Mapping[str, Callable[[Tensor, Tensor], quip.Quip | aqlm.Aqlm]] = {
    "quip": quip.quantize,
    "aqlm": aqlm.quantize,
}
Q4_K_M = "q4_k_m"
KEPT_BYTES = 2  # of a weight that stays: in bfloat16, as in the files
DEFAULT = (
    *("fp8", "fp8-block", "w8a8", "w8a8:smoothquant", "int8", "w4a16", "w4a16:gptq", "w4a16:awq", "w4a16:hqq"),
    *("nf4", "mxfp4", "nvfp4", "w3a16", "w3a16:gptq", "w2a16", "w2a16:gptq", "quip", "aqlm"),
)
PROMPT, OUTPUT, REPEATS = 32, 64, 2  # tokens, and times of which the best counts, of a measurement of speed

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Choice:
    """One way to quantize: a scheme and a method, or a reference, which is both."""

    scheme: str
    method: str = "rtn"

    @classmethod
    def of(cls, text: str) -> Choice:
        """Return the choice that `scheme`, `scheme:method` or the name of a reference names. Raise InvalidConfig."""
        if text in REFERENCES:
            return cls("2 bits", text)
        if text == Q4_K_M:
            return cls("gguf", Q4_K_M)
        scheme, _, method = text.partition(":")
        choice = cls(scheme, method or "rtn")
        if scheme not in SCHEMES:
            known = ", ".join((*SCHEMES, *REFERENCES, Q4_K_M))
            raise InvalidConfig(f"unknown scheme {scheme!r} to evaluate; known: {known}, with :METHOD behind.")
        choice.config(128).check()
        return choice

    @property
    def reference(self) -> bool:
        return self.method in REFERENCES

    @property
    def gguf(self) -> bool:
        return self.scheme == "gguf"

    def config(self, group: int) -> MakeConfig:
        return config_of(self.scheme, group, self.method)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    bits: of a quantized weight, with scales, zeros, codebooks.
    weight_bytes: of all weights, those that stay (embedding, norms) in bfloat16.
    costs: of the text's tokens.
    speed: output tokens per second by batch size; empty if no kernel multiplies with such weights here.
    """

    scheme: str
    method: str
    bits: float
    weight_bytes: float
    costs: TokenCosts
    speed: Mapping[int, float]

    @property
    def figures(self) -> dict[str, tuple[float, str, str]]:
        """Each metric's value, unit, and which is better."""
        speed = {f"output_b{batch}": (rate, "tokens/s", "higher") for batch, rate in self.speed.items()}
        return {
            "bits_per_weight": (self.bits, "bits", "lower"),
            "weight_bytes": (self.weight_bytes, "bytes", "lower"),
            "perplexity": (self.costs.perplexity, "per token", "lower"),
            "kl_mean": (self.costs.kl_mean, "nats", "lower"),
            "kl_p99": (self.costs.kl_p99, "nats", "lower"),
            "equal_greedy": (self.costs.equal_greedy, "share", "higher"),
            **speed,
        }


@dataclass(frozen=True)
class Speeds:
    """The speeds to measure: of LLM with these arguments, at these batch sizes; of none, no speed."""

    engine: Mapping[str, Any]
    batches: Sequence[int]

    def of(self, scheme: str | None, device: torch.device) -> Mapping[int, float]:
        """Return the speeds of the engine with a scheme, or nothing if it has none that runs here."""
        if scheme is not None and (scheme not in SERVED or not served_scheme(scheme).supports(Platform.of(device))):
            return {}
        options = {"max_num_seqs": max(self.batches), **self.engine, "quantization": scheme}
        with LLM(**options) as llm:
            found = {batch: speed(llm, batch) for batch in self.batches}
        del llm
        gc.collect()
        torch.cuda.empty_cache()  # the next engine sizes its cache by what is free
        return found


def measure(
    model: DenseModel,
    choices: Sequence[Choice],
    tokens_WT1: Tensor,
    calibration_BS: Tensor,
    *,
    group: int,
    speeds: Speeds,
    progress: Progress,
    baseline: DenseModel | None = None,
) -> Iterator[Row]:
    """Yield a row for the model as it is, and one for each choice, as they are found.

    baseline: the model that the predictions are compared with; default: the same.
    """
    original = (baseline or model).decoder()
    exact = [logprobs(original, tokens_T1).cpu() for tokens_T1 in tokens_WT1]
    del original
    found: dict[str | None, Mapping[int, float]] = {}
    for name in dict.fromkeys([None, *(choice.scheme for choice in choices)]) if speeds.batches else ():
        progress(f"{name or 'plain'}: speed", 0.0)
        found[name] = speeds.of(name, model.device)
    decoder = model.decoder()
    count = sum(p.numel() for p in decoder.parameters())
    yield _row("plain", "", (16.0, KEPT_BYTES * count), decoder, exact, tokens_WT1, found.get(None))
    for index, choice in enumerate(choices):
        progress(f"{choice.scheme} {choice.method}", index / len(choices))
        decoder = model.decoder()
        size = quantized(decoder, model, choice, calibration_BS, group)
        yield _row(choice.scheme, choice.method, size, decoder, exact, tokens_WT1, found.get(choice.scheme))


def _row(
    scheme: str,
    method: str,
    size: tuple[float, float],
    decoder: Decoder,
    exact: Sequence[Tensor],
    tokens_WT1: Tensor,
    speed: Mapping[int, float] | None,
) -> Row:
    pairs = zip(exact, tokens_WT1, strict=True)
    parts = [TokenCosts.between(e_TV, logprobs(decoder, t_T1).cpu(), t_T1.cpu()) for e_TV, t_T1 in pairs]
    costs = TokenCosts.joined(parts)
    return Row(scheme=scheme, method=method, bits=size[0], weight_bytes=size[1], costs=costs, speed=speed or {})


def quantized(
    decoder: Decoder, model: DenseModel, choice: Choice, calibration_BS: Tensor, group: int
) -> tuple[float, float]:
    """Quantize a decoder where it stands, and return (bits of a quantized weight, bytes of all weights)."""
    count = sum(p.numel() for p in decoder.parameters())
    if choice.gguf:
        weights, bits = _as_gguf(decoder, model)
    elif choice.reference:
        weights, bits = _by_reference(decoder, model, choice.method, calibration_BS)
    else:
        config, dtype = choice.config(group), getattr(torch, model.config.dtype)
        seen_BS = calibration_BS if config.calibrated else None
        outcome = quantize_decoder(
            decoder, model.config.weights, seen_BS, config, dtype=dtype, progress=lambda what, fraction: None
        )
        weights = sum(made.numel for made in outcome.made.values())
        bits = 8.0 * sum(made.nbytes for made in outcome.made.values())
    return bits / max(1, weights), bits / 8 + KEPT_BYTES * (count - weights)


@torch.no_grad()
def _by_reference(decoder: Decoder, model: DenseModel, method: str, calibration_BS: Tensor) -> tuple[int, float]:
    """Put dequantized weights into a decoder, layer by layer, and return how many there are and their bits."""
    run, weights, bits = Run(decoder, calibration_BS), 0, 0.0
    for index, found in groupby(matrices(decoder, model.config.weights), lambda each: each[0]):
        ours = [matrix for _, matrix in found]
        seen = run.observed(index, ours)
        for matrix in ours:
            made = REFERENCES[method](matrix.weight_OI, seen[matrix.name].hessian_II)
            matrix.weight_OI.copy_(made.dequantized())
            weights += matrix.weight_OI.numel()
            bits += made.bits_per_weight * matrix.weight_OI.numel()
        run.advance(index)
    return weights, bits


@torch.no_grad()
def _as_gguf(decoder: Decoder, model: DenseModel) -> tuple[int, float]:
    """Put weights as Q4_K_M rounds them into a decoder, and return how many there are and their bits."""
    weights, bits, layers = 0, 0.0, len(model.config.spec.layers)
    for layer, matrix in matrices(decoder, model.config.weights):
        pieces = matrix.weight_OI.split([rows for _, rows in matrix.parts])
        for name, weight_OI in zip(matrix.stored_names, pieces, strict=True):
            kind = k_quants.type_of(name.rpartition(".")[2].removesuffix("_proj"), layer, layers)
            weight_OI.copy_(k_quants.rounded(weight_OI, kind))
            weights += weight_OI.numel()
            bits += k_quants.BITS[kind] * weight_OI.numel()
    return weights, bits


def speed(llm: LLM, batch: int) -> float:
    """Return the output tokens per second of `batch` requests at once, the best of a few times."""
    vocab, draw = llm.assembly.model.spec.vocab_size, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    best = 0.0
    for _ in range(1 + REPEATS):  # the first time warms up, and prompts differ so that no prefix is cached
        prompts = [[draw.randrange(vocab) for _ in range(PROMPT)] for _ in range(batch)]
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        best = max(best, sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    return best
