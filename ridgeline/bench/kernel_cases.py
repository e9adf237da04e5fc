"""The ops with their cases, as the kernel benchmark needs them: inputs, tolerance and least cost of each case.

The cases are those of the tests and, for machines with enough memory, the shapes of real models (`REAL`). Ops with
weights are in weight_cases.py, and ops with states in recurrent_cases.py.

Legend:
    R  rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ridgeline.bench.recurrent_cases import recurrent
from ridgeline.bench.weight_cases import Subject, chosen, of_weights
from ridgeline.core.cost import Cost
from ridgeline.core.plan import Feature
from ridgeline.kernels.activation import cases as activation_cases
from ridgeline.kernels.activation import op as activation
from ridgeline.kernels.activation.cases import ActivationCase
from ridgeline.kernels.activation.cost import activation_cost
from ridgeline.kernels.attention import cases as attention_cases
from ridgeline.kernels.attention import op as attention
from ridgeline.kernels.attention.cases import AttentionCase
from ridgeline.kernels.attention.cost import attention_cost, write_kv_cost
from ridgeline.kernels.decode_attention import cases as decode_cases
from ridgeline.kernels.decode_attention import op as decode
from ridgeline.kernels.embedding import cases as embedding_cases
from ridgeline.kernels.embedding import op as embedding
from ridgeline.kernels.embedding.cases import EmbeddingCase
from ridgeline.kernels.embedding.cost import embedding_cost
from ridgeline.kernels.expanded_attention import cases as expanded_cases
from ridgeline.kernels.expanded_attention import op as expanded
from ridgeline.kernels.expanded_attention.cases import ExpandedCase
from ridgeline.kernels.expanded_attention.cost import expanded_attention_cost
from ridgeline.kernels.gated_norm import cases as gated_norm_cases
from ridgeline.kernels.gated_norm import op as gated_norm
from ridgeline.kernels.gated_norm.cases import GatedNormCase
from ridgeline.kernels.gated_norm.cost import gated_norm_cost
from ridgeline.kernels.head_linear import cases as head_linear_cases
from ridgeline.kernels.head_linear import op as head_linear
from ridgeline.kernels.head_linear.cases import HeadLinearCase
from ridgeline.kernels.latent_attention import cases as latent_cases
from ridgeline.kernels.latent_attention import op as latent
from ridgeline.kernels.latent_attention.cases import LatentCase
from ridgeline.kernels.latent_attention.cost import latent_attention_cost, latent_kv_cost
from ridgeline.kernels.norm import cases as norm_cases
from ridgeline.kernels.norm import op as norm
from ridgeline.kernels.norm.cases import NormCase
from ridgeline.kernels.norm.cost import norm_cost
from ridgeline.kernels.output_gate import cases as output_gate_cases
from ridgeline.kernels.output_gate import op as output_gate
from ridgeline.kernels.output_gate.cases import OutputGateCase
from ridgeline.kernels.output_gate.cost import output_gate_cost
from ridgeline.kernels.rotary import cases as rotary_cases
from ridgeline.kernels.rotary import op as rotary
from ridgeline.kernels.rotary.cases import RopeCase, RopeKVCase
from ridgeline.kernels.rotary.cost import rope_cost
from ridgeline.kernels.sampling import op as sampling
from ridgeline.kernels.sampling import parts
from ridgeline.kernels.sampling.cost import best_of_parts_cost, noised_cost, sample_cost
from ridgeline.kernels.sampling.noised import NOISED
from ridgeline.kernels.token_gate import cases as token_gate_cases
from ridgeline.kernels.token_gate import op as token_gate
from ridgeline.kernels.token_gate.cases import TokenGateCase
from ridgeline.kernels.token_gate.cost import token_gate_cost


@dataclass(frozen=True)
class SampleCase:
    """A greedy choice in `rows` rows of `vocab_size` logits."""

    rows: int
    vocab_size: int

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple:
        """Return the arguments. Logits are float32 whatever the model's dtype."""
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(self.rows, self.vocab_size, generator=generator, device=device)
        slots = torch.arange(self.rows, device=device)
        tables = sampling.SamplingTables.empty(self.rows, self.vocab_size, device)
        return logits, tables, slots, torch.ones_like(slots), Feature.NONE

    def part(self, dtype: torch.dtype, device: torch.device) -> tuple:
        """Return the same logits as the second half of a vocabulary."""
        logits, _, slots, positions, features = self.inputs(dtype, device)
        tables = sampling.SamplingTables.empty(self.rows, 2 * self.vocab_size, device)
        return logits, tables, slots, positions, features, self.vocab_size

    def pairs(self, dtype: torch.dtype, device: torch.device) -> tuple:
        """Return the winners of two ranks with the same logits."""
        logits, tables, slots, positions, features = self.inputs(dtype, device)
        both = [parts.draw_part(logits[:, part::2], tables, slots, positions, features, 0) for part in (0, 1)]
        return torch.stack(both, 1), tables, slots, positions, features

    def scored(self, dtype: torch.dtype, device: torch.device) -> tuple:
        """Return the same logits, and a token of each row whose logprob and rank are asked for."""
        logits, _, slots, *_ = self.inputs(dtype, device)
        return logits, slots % self.vocab_size, 0


SAMPLE_CASES = (SampleCase(1, 4096), SampleCase(8, 32_000))

REAL: Mapping[str, Sequence[Any]] = {
    "embedding": (EmbeddingCase(8192, 128_256, 4096),),
    "norm": [NormCase(t, 4096, residual=True) for t in (1, 64, 256, 8192)],
    "rope": [RopeCase(t, 32, 8, 128, 128, table_rows=32_768) for t in (1, 64, 256, 8192)],
    "rope_kv": [
        RopeKVCase(tokens=t, heads=h, kv_heads=8, head_dim=128, rotary_dim=128, norm=h == 16, table_rows=32_768)
        for h in (32, 16)
        for t in (1, 64, 256, 8192)
    ],
    "activation": [ActivationCase(t, 28_672, "silu") for t in (1, 64, 256, 8192)],
    "output_gate": [OutputGateCase(t, 4096, 2048) for t in (1, 64, 256, 8192)],
    "token_gate": [TokenGateCase(t, 2048) for t in (1, 64, 256, 8192)],
    "gated_norm": [GatedNormCase(t, 128, 128, heads=32) for t in (1, 64, 256, 8192)],
    "paged_attention": [
        AttentionCase(rows=((new, cached),) * rows, num_heads=32, num_kv_heads=8, head_dim=128)
        for rows, new, cached in ((1, 1, 8192), (8, 1, 8192), (64, 1, 1024), (256, 1, 1088), (1, 2048, 2048))
    ],
    "decode_attention": [
        decode_cases.DecodeCase(
            lengths=(cached,) * rows, num_heads=h, num_kv_heads=8, head_dim=128, rotary_dim=128, norm=h == 16
        )
        for h, rows, cached in (
            (32, 1, 192),
            (32, 1, 8192),
            (32, 8, 1024),
            (32, 64, 1024),
            (16, 1, 192),
            (16, 64, 1024),
        )
    ],
    "latent_attention": [  # DeepSeek-V3 on eight devices, and all of its heads on one
        LatentCase(rows=((new, cached),) * rows, num_heads=h, rank=512, rope_dim=64, key_dim=128, block_size=64)
        for h in (16, 128)
        for rows, new, cached in ((1, 1, 8192), (64, 1, 8192), (256, 1, 1088), (1, 2048, 2048))
    ],
    "expanded_attention": [  # DeepSeek-V2-Lite, and all heads of DeepSeek-V3
        ExpandedCase(rows=((new, cached),) * rows, num_heads=h, key_dim=128, rope_dim=64, value_dim=128)
        for h, rows, new, cached in (
            (16, 1, 8192, 8192),
            (16, 1, 1024, 1024),
            (16, 8, 1024, 1024),
            (16, 1, 2048, 32_768),
            (128, 1, 2048, 2048),
        )
    ],
    "head_linear": [
        HeadLinearCase(tokens, 16, *sizes, backwards=sizes[0] == 128)
        for tokens in (1, 64, 8192)
        for sizes in ((128, 512), (512, 128))
    ],
    "sample": [SampleCase(rows, 128_256) for rows in (1, 64, 256)],
}


def subjects(*, real: bool = False) -> Iterator[Subject]:
    """Yield the ops' own cases, followed by those of real models if wanted."""
    cases = partial(chosen, REAL if real else {})
    yield from of_weights(real=real)
    yield from recurrent(real=real)

    for c in cases("embedding", embedding_cases.CASES[:3]):
        yield Subject(embedding.EMBEDDING, f"{c.tokens} of {c.rows}x{c.width}", c.inputs, _embedding(c))
        label = f"{c.tokens} of a third of {c.rows}x{c.width}"
        yield Subject(embedding.EMBEDDING_PART, label, c.part_inputs, _embedding_part(c))
    for c in cases("norm", norm_cases.CASES):
        yield Subject(norm.RMS_NORM, _norm_label(c), c.inputs, _norm(c, "rms"))
    for c in norm_cases.CASES:
        yield Subject(norm.LAYER_NORM, _norm_label(c), c.layer_inputs, _norm(c, "layer"))
    for c in cases("rope", rotary_cases.CASES):
        yield Subject(rotary.ROPE, f"{c.tokens}x({c.heads}+{c.kv_heads})x{c.head_dim}", c.inputs, _rope(c))
    for c in cases("rope_kv", rotary_cases.FUSED_CASES):
        label = f"{c.tokens}x({c.heads}+{c.kv_heads})x{c.head_dim}" + (" norm" if c.norm else "")
        yield Subject(rotary.ROPE_KV, label, c.inputs, _rope_kv(c), epsilons=8)
    for c in cases("activation", activation_cases.CASES):
        label = f"{c.kind} {c.tokens}x{c.width // 2}"
        yield Subject(activation.GATED_ACTIVATION, label, c.inputs, _activation(c), slack=16 * 16)
    for c in cases("output_gate", output_gate_cases.CASES):
        yield Subject(output_gate.OUTPUT_GATE, f"{c.tokens}x{c.width}", c.inputs, _output_gate(c), slack=16 * 16)
    for c in cases("token_gate", token_gate_cases.CASES):
        yield Subject(token_gate.TOKEN_GATE, f"{c.tokens}x{c.width}", c.inputs, _token_gate(c), slack=16 * 16)
    for c in cases("gated_norm", gated_norm_cases.CASES):
        yield Subject(gated_norm.GATED_NORM, f"{c.tokens}x{c.heads or 1}x{c.width}", c.inputs, _gated_norm(c))
    for c in cases("paged_attention", attention_cases.CASES):
        yield _attention(c)
    for c in cases("decode_attention", decode_cases.CASES):
        yield _decode_attention(c)
    for c in cases("latent_attention", latent_cases.CASES):
        yield from _latent_attention(c)
    for c in cases("expanded_attention", expanded_cases.CASES):
        yield _expanded_attention(c)
    for c in cases("head_linear", head_linear_cases.CASES):
        label = f"{c.tokens}x{c.heads}x{c.outputs}x{c.inputs}"
        yield Subject(head_linear.HEAD_LINEAR, label, c.inputs_of, _head_linear(c), slack=c.inputs)
    for c in cases("sample", SAMPLE_CASES):
        yield Subject(sampling.SAMPLE, f"{c.rows}x{c.vocab_size}", c.inputs, _sample(c))
        yield Subject(NOISED, f"{c.rows}x{c.vocab_size}", c.inputs, _noised(c))
        yield Subject(sampling.SCORE_TOKENS, f"{c.rows}x{c.vocab_size}", c.scored, _sample(c), slack=512)
        yield Subject(parts.DRAW_PART, f"{c.rows}x{c.vocab_size} of two ranks", c.part, _sample(c))
        yield Subject(parts.BEST_OF_PARTS, f"{c.rows} of two ranks", c.pairs, _best(c))


def _sample(c: SampleCase) -> Callable[[int], Cost]:
    return lambda _: sample_cost(c.rows, c.vocab_size)


def _noised(c: SampleCase) -> Callable[[int], Cost]:
    return lambda _: noised_cost(c.rows, c.vocab_size)


def _best(c: SampleCase) -> Callable[[int], Cost]:
    return lambda _: best_of_parts_cost(c.rows, 2)


def _embedding_part(c: EmbeddingCase) -> Callable[[int], Cost]:
    return lambda item: embedding_cost(c.tokens, c.width, itemsize=item, held=1 / 3)


def _embedding(c: EmbeddingCase) -> Callable[[int], Cost]:
    return lambda item: embedding_cost(c.tokens, c.width, itemsize=item)


def _norm(c: NormCase, kind: Any) -> Callable[[int], Cost]:
    rows = c.tokens * (c.heads or 1)
    return lambda item: norm_cost(rows, c.width, itemsize=item, kind=kind, residual=c.residual)


def _norm_label(c: NormCase) -> str:
    return f"{c.tokens * (c.heads or 1)}x{c.width}" + (" +residual" if c.residual else "")


def _rope(c: RopeCase) -> Callable[[int], Cost]:
    return lambda item: rope_cost(c.tokens, c.heads, c.kv_heads, c.head_dim, c.rotary_dim, itemsize=item)


def _rope_kv(c: RopeKVCase) -> Callable[[int], Cost]:
    """Return the cost of reading the projection and of writing queries and cache entries. Rope alone would read some of
    them again, which is not counted."""

    def cost(item: int) -> Cost:
        queries = 2.0 * c.tokens * c.heads * c.head_dim * item
        kept = write_kv_cost(c.tokens, c.kv_heads, c.head_dim, itemsize=item, kv_itemsize=item)
        return Cost(queries + kept.bytes + 8.0 * c.tokens, 0.0)

    return cost


def _gated_norm(c: GatedNormCase) -> Callable[[int], Cost]:
    return lambda item: gated_norm_cost(c.tokens * (c.heads or 1), c.width, itemsize=item)


def _output_gate(c: OutputGateCase) -> Callable[[int], Cost]:
    return lambda item: output_gate_cost(c.tokens, c.width, itemsize=item)


def _token_gate(c: TokenGateCase) -> Callable[[int], Cost]:
    return lambda item: token_gate_cost(c.tokens, c.width, itemsize=item)


def _activation(c: ActivationCase) -> Callable[[int], Cost]:
    return lambda item: activation_cost(c.tokens, c.width // 2, kind=c.kind, itemsize=item, gated=True)


def _attention(c: AttentionCase) -> Subject:
    new_R, kv_R = zip(*c.rows, strict=True)
    shape: Any = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim, "window": c.window}
    window = f" window {c.window}" if c.window else ""
    return Subject(
        attention.PAGED_ATTENTION,
        f"{_rows_label(c.rows)} heads {c.num_heads}/{c.num_kv_heads}x{c.head_dim}{window}",
        lambda dtype, device: attention_cases.make_case(c, dtype, device),
        lambda item: attention_cost(new_R, kv_R, itemsize=item, kv_itemsize=item, **shape),
        slack=max(kv_R),
        epsilons=8,  # two products and the output; the weights sum to one, so the length does not matter
        options={"scale": c.head_dim**-0.5, "window": c.window},
    )


def _rows_label(rows: Sequence[tuple[int, int]]) -> str:
    """Return the new tokens and all tokens of each row."""
    new, kv = rows[0]
    return f"{len(rows)}x {new}/{kv}" if len(set(rows)) == 1 else str(rows).replace(" ", "")


def _latent_attention(c: LatentCase) -> Iterator[Subject]:
    """Yield the subjects of one latent attention, and of the launch that fills its cache."""
    new_R, kv_R = zip(*c.rows, strict=True)
    sizes: Any = {"num_heads": c.num_heads, "rank": c.rank, "rope_dim": c.rope_dim}
    label = f"{_rows_label(c.rows)} heads {c.num_heads}x({c.rank}+{c.rope_dim})"
    yield Subject(
        latent.LATENT_KV,
        label,
        partial(latent_cases.make_kv_case, c),
        lambda item: latent_kv_cost(sum(new_R), **sizes, itemsize=item),
    )
    yield Subject(
        latent.LATENT_ATTENTION,
        label,
        partial(latent_cases.make_case, c),
        lambda item: latent_attention_cost(new_R, kv_R, **sizes, itemsize=item),
        slack=max(kv_R),
        epsilons=8,
        options={"scale": (c.key_dim + c.rope_dim) ** -0.5},
    )


def _expanded_attention(c: ExpandedCase) -> Subject:
    new_R, kv_R = zip(*c.rows, strict=True)
    sizes: Any = {name: getattr(c, name) for name in ("num_heads", "key_dim", "rope_dim", "value_dim")}
    return Subject(
        expanded.EXPANDED_ATTENTION,
        f"{_rows_label(c.rows)} heads {c.num_heads}x({c.key_dim}+{c.rope_dim})/{c.value_dim}",
        partial(expanded_cases.make_case, c),
        lambda item: expanded_attention_cost(new_R, kv_R, **sizes, itemsize=item),
        slack=max(kv_R),
        epsilons=8,
        options={"scale": (c.key_dim + c.rope_dim) ** -0.5},
        stores=True,
    )


def _head_linear(c: HeadLinearCase) -> Callable[[int], Cost]:
    numbers = c.heads * (c.tokens * (c.inputs + c.outputs) + c.inputs * c.outputs)
    return lambda item: Cost(numbers * item, 2.0 * c.tokens * c.heads * c.inputs * c.outputs)


def _decode_attention(c: decode_cases.DecodeCase) -> Subject:
    """Return the subject of one decode attention.

    Its cost is to read the projection, keep keys and values, and attend; angles and weights are left out.
    """
    shape: Any = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}

    def cost(item: int) -> Cost:
        kept = write_kv_cost(len(c.lengths), c.num_kv_heads, c.head_dim, itemsize=item, kv_itemsize=item)
        ones = [1] * len(c.lengths)
        read = attention_cost(ones, c.lengths, itemsize=item, kv_itemsize=item, window=c.window, **shape)
        return Cost(kept.bytes + read.bytes, read.flops)

    same = len(set(c.lengths)) == 1
    lengths = f"{len(c.lengths)}x {c.lengths[0]}" if same else str(c.lengths).replace(" ", "")
    window = f" window {c.window}" if c.window else ""
    return Subject(
        decode.DECODE_ATTENTION,
        f"{lengths} heads {c.num_heads}/{c.num_kv_heads}x{c.head_dim}{window}" + (" norm" if c.norm else ""),
        c.inputs,
        cost,
        slack=max(c.lengths),
        epsilons=16,  # for the heads and for the attention
        options={"scale": c.head_dim**-0.5, "window": c.window},
    )
