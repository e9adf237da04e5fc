"""Heads that draft read the hidden states of a target that ranks divide, and drafts are the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.core.plan.step import Feature
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.layers.decoder import Taps
from ridgeline.layers.dense import DenseCausal
from ridgeline.parallel import token_parts
from ridgeline.parallel.mesh import Mesh
from ridgeline.worker.memory import MemoryReport
from ridgeline.worker.speculation.agreed import Agreed
from ridgeline.worker.speculation.proposer import AtOnce
from tests import tiny_models
from tests.head_oracle import Eagle3, Medusa, Target
from tests.parallel.divided import TOKENS, loaded
from tests.parallel.threads import ThreadAxis, on_ranks

CPU = torch.device("cpu")
LAYERS = 4


class Overwriting(ThreadAxis):
    """An axis that leaves a sum in the tensor that it was given, as NCCL does."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(super().all_reduce(x))


class Read(NamedTuple):
    """The things that a head or a draft by fewer layers reads of a target."""

    rows_TM: Tensor
    taps_NTM: Tensor
    normed_TM: Tensor
    logits_TV: Tensor
    skipped: list[Tensor]


@torch.inference_mode()
def read(folder: Path, mesh: Mesh) -> Read:
    decoder, positions_T = loaded(folder, mesh), torch.arange(len(TOKENS))
    taps = Taps(range(len(decoder.layers)), [])
    hidden = decoder(TOKENS, positions_T, DenseCausal(1), taps=taps)
    normed_TM = decoder.normed(hidden)
    last = len(decoder.layers) - 1
    fewer = [decoder(TOKENS, positions_T, DenseCausal(1), only=only) for only in ([last], [0], [0, last])]
    return Read(
        decoder.table_rows(TOKENS),
        torch.stack(taps.found),
        normed_TM,
        decoder.logits(hidden),  # of the same hidden states, which must not have changed
        [decoder.logits(each) for each in fewer],
    )


# norms before parts; learned positions, so that embeddings are added up at once; norms of outputs; parallel parts
@pytest.mark.parametrize(
    ("family", "by_parts"),
    [("llama", False), ("llama", True), ("gpt2", False), ("gemma2", False), ("neox", False), ("qwen3_moe", True)],
)
def test_hidden_states_are_whole_on_every_rank(
    family: str, by_parts: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_parts:
        monkeypatch.setattr(token_parts, "MIN_BYTES", 0)
    folder = tiny_model(family)
    want = read(folder, Mesh())

    def rank(axis: ThreadAxis) -> Read:
        return read(folder, Mesh(tp=Overwriting(axis.rank, axis.size, axis._barrier, axis._held)))

    first, second = on_ranks(2, rank)
    for got in (first, second):
        for one, other in zip((*got[:4], *got.skipped), (*want[:4], *want.skipped), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    for one, other in zip(first[:3], second[:3], strict=True):
        assert torch.equal(one, other)


class Own(AtOnce):
    """A proposer whose drafts depend on the rank."""

    layers, taps, depth = (), (), 3

    def __init__(self, rank: int, trees: bool) -> None:
        self.drafts_SD = torch.full((5, 3), -1, dtype=torch.int32)
        self.tree_SN = torch.ones(5, 4, dtype=torch.int64) if trees else None
        self._rank = rank

    def note(self, out_token_RK: Tensor, slots_R: Tensor, *others: object) -> None:
        self.drafts_SD[slots_R] = 10 * slots_R[:, None].int() + self._rank
        if self.tree_SN is not None:
            self.tree_SN[slots_R] = (1 << 62) + slots_R[:, None] + self._rank


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("slots", [[2], [3, 0]])
def test_the_first_ranks_drafts_count(trees: bool, slots: list[int]) -> None:
    slots_R = torch.tensor(slots)

    def rank(axis: ThreadAxis) -> Agreed:
        agreed = Agreed(Own(axis.rank, trees), axis)  # type: ignore[arg-type]
        agreed.note(slots_R[:, None], slots_R, None, Feature(0), 3, None)  # type: ignore[arg-type]
        return agreed

    for agreed in on_ranks(2, rank):
        for slot in range(5):
            assert agreed.drafts_SD[slot].tolist() == [10 * slot if slot in slots else -1] * 3
            if agreed.tree_SN is not None:
                assert agreed.tree_SN[slot].tolist() == [(1 << 62) + slot if slot in slots else 1] * 4


def test_nothing_is_said_where_nothing_is_drafted() -> None:
    class Silent:
        def all_gather(self, x: Tensor) -> Tensor:
            raise AssertionError("ranks were asked")

    slots_R = torch.tensor([1])
    agreed = Agreed(Own(0, False), Silent())  # type: ignore[arg-type]
    agreed.note(slots_R[:, None], slots_R, None, Feature(0), 0, None)  # type: ignore[arg-type]


def per_token(layout: CacheLayout) -> int:
    """The bytes that all layers keep of a block's tokens."""
    return sum(len(each.layers) * each.spec.unit_bytes(layout.tokens_held, layout.dtype) for each in layout.groups)


def test_a_rank_holds_a_part_of_the_target_and_all_of_what_drafts(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path / "target", num_hidden_layers=LAYERS)
    target = Target(tiny_models.build("llama", num_hidden_layers=LAYERS))
    head, medusa = Eagle3(target), Medusa(target)
    small = tiny_models.save("llama", tmp_path / "small", num_hidden_layers=1)

    def sizes(config: dict[str, object] | None, ranks: int = 2) -> list[MemoryReport]:
        options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 1 << 22, "speculative_config": config}

        def rank(axis: ThreadAxis) -> MemoryReport:
            mesh = Mesh(tp=axis) if ranks > 1 else Mesh()
            worker, memory = device_worker(choose(LLMConfig(model=folder, **options), CPU, mesh), None)  # type: ignore[arg-type]
            worker.shutdown()
            return memory

        return on_ranks(ranks, rank)

    def drafting(method: str, files: Path) -> dict[str, object]:
        return {"method": method, "model": files, "num_speculative_tokens": 3}

    plain, [one] = sizes(None), sizes(None, 1)
    assert one.weights / 2 < plain[0].weights < one.weights  # norms are not divided
    assert 2 * per_token(plain[0].layout) == per_token(one.layout)
    [alone] = sizes(drafting("draft_model", small), 1)
    for config, weights, kept in (
        (drafting("draft_model", small), alone.weights - one.weights, per_token(alone.layout) - per_token(one.layout)),
        (
            drafting("eagle3", head.save(tmp_path / "eagle3")),
            sum(each.nbytes for each in head.tensors.values()),
            2 * head.kv_heads * head.head_dim * 4 * one.layout.block_size,
        ),
        (drafting("medusa", medusa.save(tmp_path / "medusa")), sum(e.nbytes for e in medusa.tensors.values()), 0),
    ):
        for before, rank in zip(plain, sizes(config), strict=True):
            assert rank.weights - before.weights == weights
            assert per_token(rank.layout) - per_token(before.layout) == kept
            assert rank.kv_cache <= 1 << 22
