"""Ranks with tokens of their own that divide the experts: every token gets what one device computes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import check_experts
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.route.op import Routes, in_order
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.layers.experts import Experts
from ridgeline.parallel.exchange import Arrived, Combined, Stacks, SwapExchange
from ridgeline.parallel.mesh import Mesh
from ridgeline.weights.loader import load_weights, read_model_config
from tests.parallel.test_divided_models import MIXTURES
from tests.parallel.threads import ThreadAxis, on_ranks

OPS = Ops(Platform(device_type="cpu"))
CPU = torch.device("cpu")
CAPACITY = 12
PROMPTS = [list(range(5, 17)), [], [40], [7, 9, 9, 200, 31]]  # of the ranks: as many as can be, none, and some


def decoder_of(folder: Path, mesh: Mesh, ops: Ops = OPS) -> Decoder:
    model = read_model_config(folder)
    decoder = Decoder(model.spec, ops, dtype=torch.float32, device=CPU, max_positions=64, mesh=mesh)
    load_weights(decoder, folder, model.weights)
    decoder.prepare()
    return decoder


def logits(decoder: Decoder, prompt: list[int]) -> Tensor:
    return decoder.logits(decoder(torch.tensor(prompt), torch.arange(len(prompt)), DenseCausal(1)))


def divides(folder: Path, ranks: int) -> bool:
    try:
        check_experts(read_model_config(folder).spec, ranks)
    except InvalidConfig:
        return False
    return True


def exchange_of(axis: ThreadAxis) -> Mesh:
    return Mesh(exchange=SwapExchange(axis, CAPACITY), whole_experts=True)


@torch.inference_mode()
@pytest.mark.parametrize("family", MIXTURES)
def test_ranks_with_tokens_of_their_own_score_as_one_device(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    whole = decoder_of(folder, Mesh())

    @torch.inference_mode()
    def rank(axis: ThreadAxis) -> list[Tensor]:
        own = decoder_of(folder, exchange_of(axis))
        if not PROMPTS[axis.rank]:
            own.lend_experts()
            return []
        return [logits(own, PROMPTS[axis.rank])]

    ranks = next((count for count in (4, 2) if divides(folder, count)), None)
    if ranks is None:
        pytest.skip("neither 4 nor 2 ranks divide this model's experts")
    got = on_ranks(ranks, rank)
    for prompt, scores in zip(PROMPTS, got, strict=False):
        for scores_TV in scores:
            want = logits(whole, prompt)
            torch.testing.assert_close(scores_TV, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_a_shared_expert_that_runs_while_results_come_changes_no_bit(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, order = tiny_model(family), list[str]()

    class Watched(SwapExchange):
        def begin_combine(self, y_NM: Tensor, arrived: Arrived) -> Combined:
            if self.rank == 0:
                order.append("sent")
            return super().begin_combine(y_NM, arrived)

    def scores(hides: bool) -> list[Tensor]:
        monkeypatch.setattr(Watched, "hides", lambda _: hides)
        order.clear()

        @torch.inference_mode()
        def rank(axis: ThreadAxis) -> Tensor:
            own = decoder_of(folder, Mesh(exchange=Watched(axis, CAPACITY), whole_experts=True))
            for layer in own.layers if axis.rank == 0 else ():
                if isinstance(layer.feed_forward, Experts):
                    assert layer.feed_forward.shared is not None
                    layer.feed_forward.shared.register_forward_pre_hook(lambda *_: order.append("shared"))
            return logits(own, PROMPTS[2 * axis.rank])

        return on_ranks(2, rank)

    hidden = scores(True)
    assert order[:2] == ["sent", "shared"]
    for one, other in zip(hidden, scores(False), strict=True):
        assert torch.equal(one, other)
    assert order[:2] == ["shared", "sent"]


@torch.inference_mode()
def test_one_launch_of_a_layer_gets_routes_in_order(tiny_model: Callable[[str], Path]) -> None:
    """It takes this rank's tokens to the experts of all ranks, and what a rank without tokens lends it."""
    folder, counts = tiny_model("qwen2_moe"), list[int]()
    stacks = Ops(Platform(device_type="cpu"), {"grouped_gate_up": "torch", "grouped_down": "torch"})  # as on a GPU

    class Whole(SwapExchange):
        def in_one_launch(self, x_TM: Tensor, routes: Routes, weights: Stacks, gate: str) -> Combined:
            up, down = weights
            experts = len(up) * self.size
            want = in_order(routes.expert_TK, routes.weight_TK, experts)
            for one, other in zip(routes, want, strict=True):
                assert torch.equal(one, other)
            counts.append(len(x_TM))

            def added(add_TM: Tensor | None) -> Tensor:
                arrived = self.dispatch(x_TM, routes.expert_TK, routes.weight_TK, len(up))
                own = in_order(arrived.expert_NK, arrived.weight_NK, len(up))
                y_NM = OPS.grouped_down(OPS.grouped_gate_up(arrived.x_NM, up, None, own, gate), down, None, own, None)
                return self.combine(y_NM, arrived, add_TM)

            return added

    whole = decoder_of(folder, Mesh())

    @torch.inference_mode()
    def rank(axis: ThreadAxis) -> list[Tensor]:
        own = decoder_of(folder, Mesh(exchange=Whole(axis, CAPACITY), whole_experts=True), stacks)
        if axis.rank:
            own.lend_experts()
            return []
        return [logits(own, PROMPTS[0])]

    [[scores_TV], _] = on_ranks(2, rank)
    want_TV = logits(whole, PROMPTS[0])
    torch.testing.assert_close(scores_TV, want_TV, rtol=1e-4, atol=1e-4 * float(want_TV.abs().max()))
    assert set(counts) == {0, len(PROMPTS[0])}


@torch.inference_mode()
def test_a_token_gets_the_same_bits_whatever_other_tokens_there_are() -> None:
    def rank(prompts: list[list[int]]) -> Callable[[ThreadAxis], Tensor]:
        @torch.inference_mode()
        def work(axis: ThreadAxis) -> Tensor:
            exchange = SwapExchange(axis, 8)
            x_TM = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))[prompts[axis.rank]]
            sent_TK = torch.tensor([[0, 5], [2, 7], [6, 1], [3, 4], [0, 1], [8, 8], [7, 6], [5, 2]])[prompts[axis.rank]]
            arrived = exchange.dispatch(x_TM, sent_TK.int(), torch.full(sent_TK.shape, 0.5), 2)
            assert arrived.x_NM.shape == (4 * 8, 16)
            chosen_N = (arrived.expert_NK < 2).any(1, keepdim=True)
            factor_N1 = (arrived.weight_NK * (1 + arrived.expert_NK + 2 * axis.rank)).masked_fill(
                arrived.expert_NK == 2, 0
            )
            y_NM = torch.where(chosen_N, arrived.x_NM * factor_N1.sum(1, keepdim=True), torch.nan)
            return exchange.combine(y_NM, arrived)

        return work

    many = on_ranks(4, rank([[0, 1, 2, 3, 4, 5, 6, 7], [1], [2, 3], [5]]))
    few = on_ranks(4, rank([[6, 0], [], [], []]))
    assert torch.equal(few[0][1], many[0][0])
    assert torch.equal(few[0][0], many[0][6])
    assert torch.equal(many[0][5], torch.zeros(16))  # it goes nowhere
    x_TM = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(many[0][1], x_TM[1] * (0.5 * 3 + 0.5 * 8))
