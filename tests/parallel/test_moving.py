"""Experts that change ranks: the network is then, bit by bit, the one that is loaded with the new places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import Placement
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.rebalancing import MOST
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Copies, Experts
from ridgeline.parallel.exchange import SwapExchange
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.moves import Takes, near, takes
from ridgeline.perf.placement import equal_parts, placed
from ridgeline.quantization.experts import ListedWeights
from ridgeline.quantization.scheme import everywhere, scheme
from ridgeline.quantization.weight import weight_of
from ridgeline.weights.loader import load_weights, read_model_config
from ridgeline.worker.moving import Mover
from tests.parallel.divided import kept
from tests.parallel.test_copies import skewed
from tests.parallel.test_exchange import CAPACITY, CPU, OPS, PROMPTS, decoder_of, logits
from tests.parallel.threads import ThreadAxis, on_ranks
from tests.weights.quantized_files import SCHEMES, quantize
from tests.worker.test_memory import planned

# Scales of outputs, of activations, of blocks; codes with zeros, with exponents, with nested scales; levels
FORMS = [
    "fp8 dynamic", "fp8 static", "fp8 blocks", "gptq", "ct w4 zeros", "ct mxfp4", "ct nvfp4", "ct int8",
]  # fmt: skip


def other(placement: Placement, ranks: int) -> Placement:
    """Places for a load in which earlier experts have more, few slots from these."""
    found = []
    for held in placement:
        experts = 1 + max(expert for own in held for expert in own)
        found.append(near(held, placed(np.arange(experts)[::-1] ** 2 + 1, ranks, len(held[0]))))
    return tuple(found)


def orders(before: Placement, after: Placement) -> list[tuple[int, Takes]]:
    return [
        (mixture, order)
        for mixture, (held, wanted) in enumerate(zip(before, after, strict=True))
        for order in takes(held, wanted, 3)
    ]


def mesh_of(axis: ThreadAxis, placement: Placement, own_tokens: bool) -> Mesh:
    mesh = Mesh(whole_experts=True, placement=placement, movers=axis)
    return replace(mesh, exchange=SwapExchange(axis, CAPACITY)) if own_tokens else replace(mesh, tp=axis)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # without biases, and with them
@pytest.mark.parametrize("own_tokens", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_move_changes_a_result(family: str, own_tokens: bool, ranks: int, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    before = skewed(folder, ranks, ranks)
    after = other(before, ranks)
    moves = orders(before, after)
    assert len(moves) >= 2

    @torch.inference_mode()
    def rank(axis: ThreadAxis) -> tuple[list[Tensor], Tensor, Tensor, int]:
        decoder = decoder_of(folder, mesh_of(axis, before, own_tokens))
        mover, seen = Mover(decoder), []
        mover.check()
        tables = {name: buffer.data_ptr() for name, buffer in decoder.named_buffers()}
        for mixture, order in moves:
            mover.move(mixture, order)
            seen.append(logits(decoder, PROMPTS[0]))
        assert {name: buffer.data_ptr() for name, buffer in decoder.named_buffers()} == tables
        loaded = decoder_of(folder, mesh_of(axis, after, own_tokens))
        return seen, logits(decoder, PROMPTS[0]), logits(loaded, PROMPTS[0]), mover.copied

    want = logits(decoder_of(folder, Mesh()), PROMPTS[0])
    for seen, moved, loaded, copied in on_ranks(ranks, rank):
        assert torch.equal(moved, loaded)
        assert copied > 0
        for got in seen:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.few(4)
@torch.inference_mode()
@pytest.mark.parametrize("name", FORMS)
def test_quantized_experts_move_with_all_their_parts(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("qwen3_moe", SCHEMES[name], tmp_path / "model", hidden_size=512, head_dim=64)
    moves_are_exact(folder, lambda axis, placement: kept(folder, mesh_of(axis, placement, own_tokens=True)))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["int8", "w8a8", "w4a16", "fp8", "fp8-block"])
def test_experts_move_in_the_layouts_of_this_machine(name: str, tiny_model: Callable[[str], Path]) -> None:
    rounded = scheme(name)
    if not rounded.supports(OPS.platform):
        pytest.skip(f"{name} needs {rounded.needs}")
    folder = tiny_model("qwen3_moe")
    model = read_model_config(folder)

    def made(axis: ThreadAxis, placement: Placement) -> Decoder:
        decoder = Decoder(
            model.spec,
            OPS,
            dtype=torch.float32,
            device=CPU,
            max_positions=64,
            scheme_of=everywhere(rounded),
            mesh=mesh_of(axis, placement, own_tokens=True),
        )
        load_weights(decoder, folder, model.weights)
        return decoder

    moves_are_exact(folder, made)


def moves_are_exact(folder: Path, made: Callable[[ThreadAxis, Placement], Decoder]) -> None:
    """Compare a network whose experts moved with one that is loaded with the new places. made: a network."""
    before = skewed(folder, 2, 2)
    after = other(before, 2)

    @torch.inference_mode()
    def rank(axis: ThreadAxis) -> tuple[Tensor, Tensor]:
        decoder, loaded = made(axis, before), made(axis, after)
        decoder.prepare()
        loaded.prepare()
        mover = Mover(decoder)
        mover.check()
        logits(decoder, PROMPTS[0])  # whatever is made of weights when they are first used
        for mixture, order in orders(before, after):
            mover.move(mixture, order)
        return logits(decoder, PROMPTS[0]), logits(loaded, PROMPTS[0])

    for moved, loaded in on_ranks(2, rank):
        assert torch.equal(moved, loaded)


def test_the_memory_that_a_move_takes_is_planned(tiny_model: Callable[[str], Path]) -> None:
    """The most that an order can ask for: a rank sends as many matrices as slots change, and gets as many."""
    folder = tiny_model("qwen3_moe")
    spec = read_model_config(folder).spec
    placement = (equal_parts(2 * MOST, 2),) * len(spec.layers)
    order = [(slot, slot ^ 1) for slot in range(MOST)]

    def rank(axis: ThreadAxis) -> int:
        swap, seen = axis.swap_rows, list[int]()

        def noting(x_NB: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
            came_NB = swap(x_NB, sent, came)
            seen.append(x_NB.nbytes + came_NB.nbytes)
            return came_NB

        axis.swap_rows = noting  # type: ignore[method-assign]
        Mover(decoder_of(folder, mesh_of(axis, placement, own_tokens=False))).move(0, order)
        return max(seen)

    def bytes_with(**moving: object) -> int:
        config = LLMConfig(tensor_parallel_size=2, enable_expert_parallel=True, **moving)  # type: ignore[arg-type]
        return planned(spec, config).activations

    assert on_ranks(2, rank)[0] == bytes_with(enable_eplb=True) - bytes_with()


def test_tables_follow_the_slots() -> None:
    copies = Copies([(0, 1, 3), (0, 2, 3)], 4, torch.device("cpu"))
    copies.take([(0, 4), (4, 1)])  # all at once: slot 4 takes what slot 1 had
    fresh = Copies([(2, 1, 3), (0, 1, 3)], 4, torch.device("cpu"))
    assert torch.equal(copies.slot_EJ, fresh.slot_EJ)
    assert torch.equal(copies.count_E, fresh.count_E)


def test_experts_in_a_layout_of_onednn_are_refused(tiny_model: Callable[[str], Path]) -> None:
    """No part of such a tensor can be written."""
    decoder = decoder_of(tiny_model("qwen3_moe"), Mesh())
    Mover(decoder).check()
    experts = next(layer.feed_forward for layer in decoder.layers if isinstance(layer.feed_forward, Experts))
    blocked = weight_of(experts.ops, torch.zeros(16, 16).to_mkldnn())
    experts.down.matrices = ListedWeights([blocked], 16)
    with pytest.raises(InvalidConfig, match="oneDNN's own layout"):
        Mover(decoder).check()
