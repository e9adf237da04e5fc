"""A layer that chooses blocks and experts beside one with dense attention in float64, and what choosing costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.cuda.predict import CHIPS

module = pytest.importorskip("ridgeline.kernels.attention.ladder.expert_layer")
ExpertLayer, ExpertShape, Moba, Nsa, parts = (
    getattr(module, name) for name in ("ExpertLayer", "ExpertShape", "Moba", "Nsa", "parts")
)
PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "attention-ladder.md"
SMALL = ExpertShape(model=32, heads=4, groups=2, size=16, experts=6, chosen=2, inner=24)


def layer_error(sparse, weights, x_BTM: torch.Tensor, shape=SMALL, dtype=torch.float32, device: str = "cpu") -> float:
    found = ExpertLayer(shape, weights.to(device, dtype), sparse)(x_BTM.to(device, dtype))
    want = module.dense_layer(shape, weights, x_BTM)
    return float((found.cpu().double() - want).norm() / want.norm())


def only_chosen_blocks(weights):
    """Gates of 0, 1 and 0, whatever a token is."""
    gates = torch.tensor([-torch.inf, torch.inf, -torch.inf], dtype=torch.float64).repeat(len(weights.gates_Y) // 3)
    return replace(weights, gates_Y=gates)


@pytest.mark.parametrize("sparse", [None, Moba(16, 5), Nsa(length=8, stride=4, block=16, selected=5, window=9)])
def test_a_layer_that_reads_all_blocks_is_the_dense_one(sparse) -> None:
    weights, x = module.drawn_weights(SMALL, sparse), torch.randn(2, 75, 32, dtype=torch.float64)
    weights = only_chosen_blocks(weights) if isinstance(sparse, Nsa) else weights
    assert layer_error(sparse, weights, x) <= 5e-6


@pytest.mark.parametrize("sparse", [Moba(16, 2), Nsa(length=8, stride=4, block=16, selected=3, window=9)])
def test_a_layer_that_reads_few_blocks_is_another(sparse) -> None:
    """For tokens behind those that see all blocks yet; for these it is the dense one."""
    weights, x = module.drawn_weights(SMALL, sparse), torch.randn(1, 100, 32, dtype=torch.float64)
    weights = only_chosen_blocks(weights) if isinstance(sparse, Nsa) else weights
    found = ExpertLayer(SMALL, weights.to(torch.float32), sparse)(x.float()).double()
    far = (found - module.dense_layer(SMALL, weights, x)).norm(dim=-1)[0]
    assert far[:32].max() <= 1e-4
    assert far[70:].median() >= 1e-2


def test_the_page_has_what_choosing_costs() -> None:
    assert "\n".join(module.table(CHIPS[-1])) in PAGE.read_text()


def test_parts_are_the_flops_of_a_layer() -> None:
    """Counted by torch for dense attention, whose count has both halves of the square."""
    from torch.utils.flop_counter import FlopCounterMode

    weights, x = (
        module.drawn_weights(SMALL, None).to("meta"),
        torch.zeros(1, 64, 32, dtype=torch.float64, device="meta"),
    )
    with FlopCounterMode(display=False) as counted:
        n = torch.nn.functional.linear(x, weights.q_XM), torch.nn.functional.linear(x, weights.kv_XM)
        torch.nn.functional.linear(n[0], weights.o_MX)
    chip = CHIPS[-1]
    assert parts(SMALL, None, 64, chip)["projections"] * chip.matrix == pytest.approx(counted.get_total_flops())
    assert parts(SMALL, None, 64, chip)["attention"] * chip.matrix == 4 * 16 * 4 * 64 * 65 / 2
    assert parts(SMALL, None, 64, chip)["blocks"] == 0


def test_sparse_layers_read_fewer_keys_the_longer_the_text() -> None:
    for sparse in (Moba(), Nsa()):
        gains = [module.keys_read(None, n) / module.keys_read(sparse, n) for n in (4096, 16384, 65536)]
        assert gains == sorted(gains)
        assert gains[-1] > 6


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [None, Moba(128, 3), Nsa(selected=5, window=64)])
def test_on_a_gpu(sparse) -> None:
    shape = ExpertShape(model=256, heads=16, groups=1, size=64, experts=8, chosen=2, inner=128)
    weights, x = module.drawn_weights(shape, sparse), torch.randn(1, 300, 256, dtype=torch.float64)
    weights = only_chosen_blocks(weights) if isinstance(sparse, Nsa) else weights
    layer = ExpertLayer(shape, weights.to("cuda", torch.bfloat16), sparse)
    want = module.dense_layer(shape, weights, x)
    off = (layer(x.to("cuda", torch.bfloat16)).cpu().double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert off.median() <= 2e-2  # a few tokens may go to another expert, where two are nearly equal
