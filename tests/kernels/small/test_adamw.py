"""AdamW of many tensors in one kernel beside torch's, with clipping, steps that are left out, and another count of
steps for some tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from ridgeline.training.optimizer import DeviceAdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = ((5000,), (3, 7), (4096,), (1,), (2, 4100))


def weights(device: str) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=draw).to(device)) for size in SIZES]


def grouped(parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    decayed, plain = parameters[:3], parameters[3:]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def gradients(step: int, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1 + step)
    return [torch.randn(size, generator=draw).to(device) for size in SIZES]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_torchs(device: str) -> None:
    ours, theirs = weights(device), weights(device)
    own = DeviceAdamW(grouped(ours), lr=0.01, betas=(0.9, 0.99))
    reference = torch.optim.AdamW(grouped(theirs), lr=0.01, betas=(0.9, 0.99))
    own.grad_scale, own.found_inf = torch.tensor(4.0, device=device), torch.tensor(0.0, device=device)
    for step in range(4):
        for parameters, divisor in ((ours, 1), (theirs, 4)):
            for parameter, grad in zip(parameters, gradients(step, device), strict=True):
                parameter.grad = grad / divisor
            if step == 1:
                parameters[1].grad = None  # so it is a step behind from here on
        own.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            mine, wanted = own.state[one][name], reference.state[other][name]
            torch.testing.assert_close(mine.cpu(), wanted.cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_broken_changes_nothing(device: str) -> None:
    parameters = weights(device)
    own = DeviceAdamW(parameters, lr=0.01)

    def stepped(seed: int) -> list[Tensor]:
        for parameter, grad in zip(parameters, gradients(seed, device), strict=True):
            parameter.grad = grad
        own.step()
        return [x.detach().clone() for p in parameters for x in (p, *own.state[p].values())]

    before = stepped(0)
    own.found_inf = torch.ones((), device=device)
    assert all(torch.equal(one, other) for one, other in zip(before, stepped(1), strict=True))
    own.found_inf = torch.zeros((), device=device)
    assert not torch.equal(before[0], stepped(1)[0])


def test_gradients_that_are_not_dense_are_taken() -> None:
    weight = nn.Parameter(torch.zeros(6, 4))
    weight.grad = torch.arange(24.0).view(4, 6).T
    own = DeviceAdamW([weight], lr=1.0, weight_decay=0.0)
    before = weight._version
    own.step()
    assert weight._version > before  # so that what was made of it is made anew
    assert weight[0, 0] == 0
    assert torch.allclose(weight.flatten()[1:], torch.tensor(-1.0))
    assert torch.allclose(own.state[weight]["exp_avg"], 0.1 * weight.grad)
