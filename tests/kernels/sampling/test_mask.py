"""Token masks as packed bits: every implementation forbids what a look at single bits forbids, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan import token_bits
from ridgeline.core.plan.request import SamplingParams
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.sampling import op
from ridgeline.kernels.sampling import triton_mask as kernel
from ridgeline.worker.masks import Masks
from tests.engine.profiles import quick_settings
from tests.kernels.sampling.sampling_tables import Row, sampling_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in op.MASK_LOGITS.implementations)]


def by_single_bits(logits_RV: torch.Tensor, words: dict[int, list[int]]) -> torch.Tensor:
    """What must come out, a token at a time. words: row → its mask, as plain numbers."""
    wanted = logits_RV.clone()
    for row, numbers in words.items():
        for token in range(logits_RV.shape[1]):
            if not numbers[token // 32] >> token % 32 & 1 and not logits_RV[row, token].isnan():
                wanted[row, token] = -torch.inf
    return wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 320, 4097])
def test_exactly_the_clear_bits_are_forbidden(vocab: int, dtype: torch.dtype, name: str, device: str) -> None:
    """Rows with masks and without, in any order, with infinities and NaN among the logits; rows need not be packed."""
    random = np.random.default_rng(vocab)
    wide = torch.randn(6, vocab + 5, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits = wide[:, :vocab]
    logits[1, :: max(1, vocab // 7)] = torch.nan
    logits[4, : vocab // 2] = torch.inf
    words = {row: random.integers(0, 2**32, token_bits.num_words(vocab), np.uint32) for row in (4, 0, 1)}
    words[5] = np.zeros_like(words[0])
    wanted = by_single_bits(logits, {row: bits.tolist() for row, bits in words.items()})
    got = wide.to(device)
    mask_logits = op.MASK_LOGITS.choose(Platform.of(torch.device(device)), name)
    mask_logits(got[:, :vocab], *Masks.of(words, vocab, torch.device(device)))
    assert torch.equal(got[:, :vocab].cpu().nan_to_num(nan=7.25), wanted.nan_to_num(nan=7.25))
    assert torch.equal(got[:, vocab:].cpu(), wide[:, vocab:]), "what lies beyond the vocabulary is somebody else's"


@quick_settings(60)
@given(members=st.lists(st.booleans(), min_size=1, max_size=100), data=st.data())
def test_packed_bits_are_the_set_of_tokens(members: list[bool], data: st.DataObject) -> None:
    bits = token_bits.packed(np.array(members))
    assert len(bits) == -(-len(members) // 32)
    assert sum(int(word) << 32 * n for n, word in enumerate(bits)) == sum(1 << n for n, m in enumerate(members) if m)
    assert token_bits.unpacked(bits, len(members)).tolist() == members
    gone = data.draw(st.lists(st.integers(0, len(members) - 1), max_size=5))
    few = token_bits.Few(gone)
    before = few.remove(bits)
    left = [member and token not in gone for token, member in enumerate(members)]
    assert token_bits.unpacked(bits, len(members)).tolist() == left
    assert token_bits.is_empty(bits) == (not any(left))
    few.restore(bits, before)
    assert token_bits.unpacked(bits, len(members)).tolist() == members


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_masked_row_of_nan_is_known_for_what_it_is(name: str) -> None:
    """Its token is -1, which ends the request with a reason; not some forbidden one."""
    logits = torch.full((1, 50), torch.nan)
    masks = Masks.of({0: token_bits.packed(np.arange(50) == 7)}, 50, torch.device("cpu"))
    op.MASK_LOGITS.choose(Platform.of(torch.device("cpu")), name)(logits, *masks)
    sampling = sampling_of([Row(SamplingParams(temperature=0))], 50)
    for implementation in op.SAMPLE.implementations:
        assert implementation.load()(logits, *sampling).tolist() == [-1]


def test_nothing_is_launched_for_rows_without_masks() -> None:
    """A program for every tile of a masked row: a step of 256 rows of which one has a mask pays for one."""
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *_, **__: launched.append(grid)

    masks = Masks.of({3: token_bits.packed(np.ones(9000, np.bool_))}, 9000, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "mask_kernel", Recorder())
        kernel.mask(torch.zeros(256, 9000), *masks)
    assert launched == [(3, 1)]
