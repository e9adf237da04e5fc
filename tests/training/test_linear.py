"""Models of linear attention train on a GPU through its kernels, and learn what they learn through plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.training.linear import GLA_CONFIG, RETNET_CONFIG
from ridgeline.training.objective import NextTokenLoss, training_ops
from ridgeline.training.optimizer import initialize

pytest.importorskip("triton")
CPU = torch.device("cpu")
GPU = Platform(device_type="cuda", arch="sm_90")


def gradients(config: dict[str, Any], overrides: dict[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients of one batch."""
    spec = model_config(config).spec
    decoder = Decoder(spec, Ops(Platform.of(CPU), overrides=overrides), dtype=torch.float32, device=CPU)
    initialize(decoder, len(spec.layers), seed=0)
    tokens_BS1 = torch.randint(0, 300, (2, 71), generator=torch.Generator().manual_seed(0))
    loss = NextTokenLoss(decoder, batch_size=2, chunk=4096, autocast=None)(tokens_BS1)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", [GLA_CONFIG, RETNET_CONFIG], ids=lambda config: config["model_type"])
def test_a_gpus_ops_have_the_gradients_of_plain_torch(config: dict[str, Any]) -> None:
    small = config | {"num_hidden_layers": 2}
    on_gpu, on_cpu = training_ops(GPU), training_ops(Platform.of(CPU))
    assert (on_gpu["linear_attention"], on_cpu["linear_attention"]) == ("triton_training", "torch")
    ours, theirs = gradients(small, on_gpu), gradients(small, on_cpu)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    assert set(ours[1]) == set(theirs[1])
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()), msg=name
        )
