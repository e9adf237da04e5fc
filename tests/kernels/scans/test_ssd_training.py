"""Mamba-2's recurrence in plain torch has the gradients of the recurrence in float64, for rows of any lengths.

Legend:
    T  tokens
    H  heads
    P  head width
    G  groups
    S  state width
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import rows_of
from ridgeline.kernels.scans.ssd import torch_ops
from ridgeline.kernels.scans.ssd.op import SsdInputs
from ridgeline.kernels.scans.ssd.torch_ops import ssd
from ridgeline.models import model_config
from ridgeline.training.embedded import llama_config
from ridgeline.training.linear import MAMBA2_CONFIG
from ridgeline.training.objective import training_decoder
from ridgeline.training.optimizer import initialize

H, P, G, S = 4, 8, 2, 5
CPU = torch.device("cpu")


def recurrence(given: SsdInputs, lengths: list[int]) -> Tensor:
    """Compute the formula of the paper token by token, in the numbers' own type."""
    step_TH = torch.nn.functional.softplus(given.dt_TH + given.dt_bias_H)
    found, at = [], 0
    for length in lengths:
        state_HPS = torch.zeros(H, P, S, dtype=given.x_THP.dtype)
        for t in range(at, at + length):
            b_HS, c_HS = (x[t].repeat_interleave(H // G, dim=0) for x in (given.b_TGS, given.c_TGS))
            left_H11 = (step_TH[t] * given.rate_H).exp()[:, None, None]
            added_HPS = (step_TH[t][:, None] * given.x_THP[t])[..., None] * b_HS[:, None]
            state_HPS = left_H11 * state_HPS + added_HPS
            found.append((state_HPS * c_HS[:, None]).sum(-1) + given.skip_H[:, None] * given.x_THP[t])
        at += length
    return torch.stack(found)


def numbers(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x_THP": (tokens, H, P), "dt_TH": (tokens, H), "rate_H": (H,), "b_TGS": (tokens, G, S),
        "c_TGS": (tokens, G, S), "skip_H": (H,), "dt_bias_H": (H,),
    }  # fmt: skip
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return found | {"rate_H": -found["rate_H"].exp()}


def test_gradients_are_those_of_the_recurrence_for_rows_of_unlike_lengths() -> None:
    lengths = [70, 2, 200, 64]
    values = numbers(sum(lengths))
    weight = torch.randn(sum(lengths), H, P, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (
        {n: x.to(dtype).requires_grad_() for n, x in values.items()} for dtype in (torch.float32, torch.float64)
    )
    metadata = rows_of(lengths, [1, 2, 3, 4], CPU, fresh=True)
    y_THP = ssd(SsdInputs(**ours, dt_min=0.0, dt_max=float("inf")), torch.ones(5, H, P, S), metadata)
    exact_THP = recurrence(SsdInputs(**theirs, dt_min=0.0, dt_max=float("inf")), lengths)
    torch.testing.assert_close(y_THP.double(), exact_THP, rtol=1e-4, atol=1e-4)
    (y_THP * weight.float()).sum().backward()
    (exact_THP * weight).sum().backward()
    for name, exact in theirs.items():
        assert exact.grad is not None
        largest = float(exact.grad.abs().max())
        found = ours[name].grad
        assert found is not None
        torch.testing.assert_close(found.double(), exact.grad, rtol=1e-3, atol=1e-4 * largest, msg=name)


def test_rows_in_several_groups_of_chunks_have_the_same_outputs_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk at a time, three at a time, and all at once: with marks, and with states to begin with."""
    lengths, found = [130, 65, 300], []
    values = {name: x.float() for name, x in numbers(sum(lengths)).items()}
    for chunks in (1, 3, 100):
        monkeypatch.setitem(torch_ops.AT_ONCE, "cpu", chunks * H * (2 * 64 * 64 + 2 * P * S + 3 * 64 * P))
        states = torch.randn(4, H, P, S, generator=torch.Generator().manual_seed(2))
        metadata = rows_of(lengths, [1, 2, 3], CPU, fresh=False)
        y = ssd(SsdInputs(**values, dt_min=0.0, dt_max=float("inf")), states, metadata)
        found.append((y, states))
    for y, states in found[1:]:
        torch.testing.assert_close(y, found[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states, found[0][1], rtol=1e-5, atol=1e-5)


def test_steps_and_rates_begin_in_the_papers_ranges() -> None:
    decoder = training_decoder(model_config(MAMBA2_CONFIG | {"num_hidden_layers": 2}).spec, torch.float32, CPU)
    initialize(decoder, 2, seed=0)
    for layer in decoder.layers:
        steps = torch.nn.functional.softplus(layer.mixer.dt_bias.detach())
        assert 1e-3 <= float(steps.min()) < float(steps.max()) <= 0.1
        assert bool(((layer.mixer.rate() <= -1) & (layer.mixer.rate() >= -16)).all())
        assert float(layer.mixer.conv.weight.detach().abs().max()) <= 0.5
    llama = training_decoder(
        model_config(llama_config(hidden=64, intermediate=64, layers=1, heads=1, kv_heads=1)).spec, torch.float32, CPU
    )
    initialize(llama, 1, seed=0)
    assert 0.015 < float(llama.embed.weight.detach().std()) < 0.025
