"""Cases of sparse attention, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.cases import LatentCase
from ridgeline.kernels.attention.sparse.cost import (
    choice_bits_cost,
    index_keys_cost,
    index_topk_cost,
    sparse_attention_cost,
)
from ridgeline.kernels.attention.sparse.op import IndexCache
from ridgeline.kernels.base.case import Cases, as_cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.kv_cache import torch_type
from ridgeline.kernels.base.kv_format import kv_format


@dataclass(frozen=True, kw_only=True)
class SparseCase(LatentCase):
    """Attention to tokens that were chosen before.

    selected: tokens that a token attends to. heads, dim: of the indexer. keys: the format of its cached keys.
    """

    selected: int = 24
    heads: int = 5
    dim: int = 24
    keys: str = "auto"

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return those of `LatentCase`, and random choices: distinct places that a token sees, then -1."""
        *tensors, batch = super().inputs(dtype, device, seed)
        made = torch.Generator().manual_seed(seed)
        chosen: list[Tensor] = []
        for new, kv in self.rows:
            for seen in range(kv - new + 1, kv + 1):
                place = torch.randperm(seen, generator=made)[: self.selected].sort().values
                chosen.append(torch.nn.functional.pad(place, (0, self.selected - len(place)), value=-1))
        return *tensors, batch, torch.stack(chosen).int().to(device)

    @property
    def label(self) -> str:
        return f"{super().label} of {self.selected}"

    @property
    def slack(self) -> int:
        return min(self.selected, max(kv for _, kv in self.rows))

    def cost(self, itemsize: int) -> Cost:
        return sparse_attention_cost(
            *zip(*self.rows, strict=True), **self.sizes, count=self.selected, itemsize=itemsize
        )

    @property
    def form(self) -> str:
        return "" if self.keys == "auto" else self.keys

    def key_itemsize(self, itemsize: int) -> float:
        """Return the bytes of a number of a cached key."""
        form = kv_format(self.keys)
        return form.itemsize(self.dim, "bfloat16") if form.quantized else itemsize


class IndexTopkCase(SparseCase):
    """The choice before it."""

    epsilons: ClassVar[int] = 0

    @property
    def label(self) -> str:
        return f"{super().label} by {self.heads}x{self.dim} {self.form}".rstrip()

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return small whole numbers, whose scores every implementation computes alike, so that choices are equal, ties
        and all."""
        _, _, cache_NPW, batch, _ = super().inputs(dtype, device, seed)
        made = torch.Generator(device).manual_seed(seed)
        tokens = sum(new for new, _ in self.rows)

        def whole(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=made, device=device)

        form, unseen_NP = kv_format(self.keys), cache_NPW[..., 0].isnan()
        keys_NPD = whole(*cache_NPW.shape[:2], self.dim).to(torch_type(form, dtype))
        scale_NP: Tensor | None = None
        if form.quantized:
            scale_NP = torch.tensor(2.0, device=device) ** whole(*cache_NPW.shape[:2])
            scale_NP = scale_NP.masked_fill(unseen_NP, torch.nan).bfloat16()
        else:
            keys_NPD[unseen_NP] = torch.nan
        cache, weights_TI = IndexCache(keys_NPD, scale_NP), whole(tokens, self.heads).float()
        return whole(tokens, self.heads, self.dim).to(dtype), weights_TI, cache, batch

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {"count": self.selected}

    def cost(self, itemsize: int) -> Cost:
        sizes = {"heads": self.heads, "dim": self.dim, "count": self.selected}
        kept = self.key_itemsize(itemsize)
        return index_topk_cost(*zip(*self.rows, strict=True), **sizes, itemsize=itemsize, key_itemsize=kept)


class IndexKeysCase(SparseCase):
    """The launch that fills the indexer's cache and rotates its queries."""

    epsilons: ClassVar[int] = 4
    checked = True

    @property
    def slack(self) -> int:
        return 16

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {}

    def cost(self, itemsize: int) -> Cost:
        tokens = sum(new for new, _ in self.rows)
        kept = self.key_itemsize(itemsize)
        return index_keys_cost(tokens, heads=self.heads, dim=self.dim, itemsize=itemsize, key_itemsize=kept)

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> tuple[Any, ...]:
        """Return random arguments: keys that are a view of wider rows, and a cache whose blocks lie apart."""
        tokens, made = sum(new for new, _ in self.rows), torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made)

        q_TID = normal(tokens, self.heads, self.dim).to(device, dtype)
        key_TD = normal(tokens, self.dim + 16).to(device, dtype)[:, 8:-8]
        norm_2D = (1 + 0.1 * normal(self.dim)).to(device, dtype), normal(self.dim).to(device, dtype)
        angles = normal(64, self.rope_dim // 2)
        cos_sin_ZY = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        positions_T = torch.randint(64, (tokens,), generator=made).to(device)
        blocks = -(-tokens // self.block_size) + 2
        place_T = torch.randperm(blocks * self.block_size, generator=made)[:tokens].to(device)
        form, shape = kv_format(self.keys), (blocks, 2, self.block_size, self.dim)
        scales = torch.full(shape[:3], torch.nan, dtype=torch.bfloat16, device=device) if form.quantized else None
        empty = 0 if form.quantized else torch.nan
        keys = torch.full(shape, empty, dtype=torch.float32, device=device).to(torch_type(form, dtype))
        cache = IndexCache(keys[:, 1], None if scales is None else scales[:, 1])
        return q_TID, key_TD, norm_2D, 1e-6, cos_sin_ZY, positions_T, self.interleaved, cache, place_T


class ChoiceBitsCase(SparseCase):
    """The choice as a mask."""

    epsilons: ClassVar[int] = 0

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        *_, chosen_TK = super().inputs(dtype, device, seed)
        return chosen_TK, self.words

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {}

    @property
    def words(self) -> int:
        return -(-max(kv for _, kv in self.rows) // 64)

    def cost(self, itemsize: int) -> Cost:
        return choice_bits_cost(sum(new for new, _ in self.rows), words=self.words, count=self.selected)


CASES = (
    SparseCase(rows=((1, 1),)),
    SparseCase(rows=((1, 17), (1, 25), (1, 164)), interleaved=False),
    SparseCase(rows=((7, 7), (40, 50), (1, 20)), selected=16),
    SparseCase(rows=((30, 100), (1, 90), (0, 4), (1, 1)), block_size=4, selected=33, heads=16, dim=32),
    SparseCase(rows=((1, 700), (2, 1300)), num_heads=20, rank=512, rope_dim=64, block_size=64, selected=300, dim=80),
)


def _deepseek(heads: int, *rows: tuple[int, int]) -> SparseCase:
    shapes: dict[str, Any] = {"rank": 512, "rope_dim": 64, "key_dim": 128, "block_size": 64}
    index: dict[str, Any] = {"selected": 2048, "heads": 64, "dim": 128}
    return SparseCase(rows=rows, num_heads=heads, interleaved=False, **shapes, **index)


LEVELS = tuple(
    replace(CASES[case], keys=keys) for case, keys in ((1, "fp8_e4m3"), (2, "fp8_e5m2"), (3, "int8"), (4, "int8"))
)
HEADS = (16, 128)  # of DeepSeek-V3.2 on eight devices, and all of its heads on one
LENGTHS = (8192, 32_768, 65_536)
REAL = [
    *(_deepseek(heads, *[(1, length)] * rows) for heads in HEADS for rows in (1, 64) for length in LENGTHS),
    *(_deepseek(heads, (2048, length)) for heads in HEADS for length in LENGTHS),
]

INDEXED = [replace(case, keys=keys) for case in REAL if case.num_heads == HEADS[1] for keys in ("auto", "int8")]

OP_CASES = {
    "index_keys": Cases(as_cases(IndexKeysCase, (*CASES, *LEVELS)), as_cases(IndexKeysCase, INDEXED)),
    "index_topk": Cases(as_cases(IndexTopkCase, (*CASES, *LEVELS)), as_cases(IndexTopkCase, INDEXED)),
    "choice_bits": Cases(as_cases(ChoiceBitsCase, CASES), as_cases(ChoiceBitsCase, REAL[-3:])),
    "sparse_attention": Cases(CASES, REAL),
}
