"""Activations that the op before rounds, from layer to layer. `FormedWeight.buffer` gives a buffer on Hopper alone, and
everywhere in these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, Fp8, to_fp8
from ridgeline.kernels.gemm.plain import rounded
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.norm.op import rms_norm
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.mlp import GatedMLP
from ridgeline.quantization.scheme import everywhere, scheme
from ridgeline.quantization.weight import FormedWeight, weight_of
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import read_model_config
from tests.driving import ask, rig

REFERENCE = {"fp8_linear": "reference"}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Rounded]:
    """All FP8 weights give a buffer. The list gets what they then multiply."""
    found: list[Rounded] = []

    def buffer(weight: FormedWeight, tokens: int, dtype: torch.dtype) -> Rounded | None:
        if not isinstance(weight.form, Fp8):
            return None
        return rounded.buffer(tokens, weight.stored.shape[1], dtype, weight.stored.device)

    linear = FormedWeight.linear

    def observed(weight: FormedWeight, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        if isinstance(x_TI, Rounded):
            found.append(x_TI)
        return linear(weight, x_TI, bias_O)

    monkeypatch.setattr(FormedWeight, "buffer", buffer)
    monkeypatch.setattr(FormedWeight, "rounds_gated", lambda weight, tokens, dtype: isinstance(weight.form, Fp8))
    monkeypatch.setattr(FormedWeight, "linear", observed)
    return found


def test_a_feed_forward_errs_no_more_with_scales_of_128_inputs_than_with_those_of_tokens(taken: list[Rounded]) -> None:
    spec = read_model_config(EMBEDDED_MODEL).spec
    ops = Ops(Platform(device_type="cpu"), REFERENCE)
    decoder = Decoder(spec, ops, dtype=torch.float32, device=torch.device("cpu"), scheme_of=everywhere(scheme("fp8")))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    decoder.prepare()
    norm, mlp = decoder.layers[0].feed_forward_norm, decoder.layers[0].feed_forward
    assert isinstance(mlp, GatedMLP)
    x_TM, residual_TM = torch.randn(33, spec.hidden_size), torch.randn(33, spec.hidden_size)
    n_TM = rms_norm((x_TM + residual_TM).double(), None, norm.weight.double(), norm.eps)[0]
    both, down = (matrix.form.dequantized().double() for matrix in (mlp.gate_up.matrix, mlp.down.matrix))
    want_TM = gated_activation(n_TM @ both.T, mlp.kind) @ down.T
    errors = []
    for _ in range(2):
        y_TM, s_TM = mlp(norm, x_TM, residual_TM)
        assert torch.equal(s_TM, x_TM + residual_TM)
        errors.append((y_TM - want_TM).pow(2).mean().sqrt().item() / want_TM.std().item())
        mlp.gate_up.normed_for = lambda then, *given, gate: mlp.gate_up.normed(*given, gate=gate)  # by tokens
    assert len(taken) == 1
    assert 0 < errors[0] < 1.05 * errors[1]
    assert errors[1] < 0.1


def test_steps_hand_rounded_activations_from_op_to_op(tiny_model: Callable[[str], Path], taken: list[Rounded]) -> None:
    """Prompts' attention leaves its result as it is; the feed-forward and a token's attention round theirs."""
    with rig(tiny_model("llama"), quantization="fp8", kernels=REFERENCE) as own:
        layers = len(own.runner.segments.decoder.layers)
        outcome = own.run(ask("a", range(5, 17), max_tokens=4))["a"]
        assert not own.errors
    assert len(outcome.tokens) == 4
    prompt, step = [x for x in taken if len(x.q_TI) == 12], [x for x in taken if len(x.q_TI) == 1]
    assert len(prompt) == layers
    assert len(step) == 2 * layers * (len(step) // (2 * layers)) >= 2 * layers * 3
    assert all(x.wide().isfinite().all() for x in taken)


def test_no_room_is_given_where_a_token_must_have_the_same_bits_in_any_company() -> None:
    for chosen in ("batch_invariant", "torch", "reference"):
        ops = Ops(Platform(device_type="cpu"), {"fp8_linear": chosen})
        with torch.inference_mode():
            assert weight_of(ops, to_fp8(torch.randn(256, 256), BY_TOKEN)).buffer(1, torch.bfloat16) is None
