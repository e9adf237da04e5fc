"""Experts held by every scheme on a CPU: the same function from another form of the weights, in the memory it says.

Tolerances: a level is off by at most half a scale, which is a 127th of its row's largest weight, some 3 standard
deviations of it. So a product is off by about 3 / 127 / sqrt(12) = 0.7 % of its norm, and three of them in a row by
1.2 %; rounded activations double the variance. Twice that is allowed. Plain weights keep their numbers: each of two
products is rounded to bfloat16 once, here and there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.core.expert_spec import ExpertsSpec, RoutingSpec
from ridgeline.core.model_spec import MLPSpec, NormSpec
from ridgeline.kernels.op import Platform
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.layers.build import Build
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.norm import Norm
from ridgeline.quantization import SCHEMES
from ridgeline.quantization.scheme import everywhere, scheme

CPU, HERE = torch.device("cpu"), Platform(device_type="cpu")
WIDTH, EXPERTS = 64, 8
SPEC = ExpertsSpec(routing=RoutingSpec(experts=EXPERTS, top_k=2, renormalize=True), intermediate_size=96)
ERRORS = {"plain": 4 * 2.0**-8, "int8": 0.024, "w8a8": 0.035}
SCHEMES_HERE = [name for name in ERRORS if SCHEMES[name].supports(HERE)]


def layer(spec: ExpertsSpec, name: str, ops: Ops | None = None, dtype: torch.dtype = torch.bfloat16) -> Experts:
    made = Experts(spec, WIDTH, Build(ops or Ops(HERE), dtype, CPU, everywhere(scheme(name))))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * WIDTH**-0.5)
    return made.requires_grad_(False)


def prepare(made: Experts) -> Experts:
    for module in made.modules():
        if isinstance(module, ExpertStack):
            module.prepare()
    return made


def norm(dtype: torch.dtype = torch.bfloat16) -> Norm:
    made = Norm(NormSpec(kind="rms", eps=1e-6), WIDTH, Build(Ops(HERE), dtype, CPU, everywhere(scheme(None))))
    torch.nn.init.ones_(made.weight)
    return made.requires_grad_(False)


@pytest.mark.parametrize("name", SCHEMES_HERE)
@pytest.mark.parametrize("tokens", [1, 8, 50])
@pytest.mark.parametrize("kind", ["bare", "biased", "shared"])
def test_prepared_experts_compute_what_the_reference_does(name: str, tokens: int, kind: str) -> None:
    shared = MLPSpec(intermediate_size=32, activation="silu")
    spec = {"bare": SPEC, "biased": replace(SPEC, bias=True), "shared": replace(SPEC, shared=shared)}[kind]
    references = Ops(HERE, dict.fromkeys(OPS, "reference"))
    x_TM = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(6)).bfloat16()
    live_T = torch.arange(tokens) != tokens - 1 if tokens > 1 else None  # the last belongs to no request
    want, _ = layer(spec, "plain", references)(norm(), x_TM, None, live_T)
    got, _ = prepare(layer(spec, name))(norm(), x_TM, None, live_T)
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    assert (got.float() - want.float()).norm() < ERRORS[name] * want.float().norm()
    if live_T is not None and kind != "shared":
        assert not got[-1].any()


@pytest.mark.parametrize("name", SCHEMES_HERE)
def test_what_experts_take_is_counted(name: str) -> None:
    numbers = EXPERTS * 3 * WIDTH * SPEC.intermediate_size
    rows = EXPERTS * (2 * SPEC.intermediate_size + WIDTH)
    made = prepare(layer(SPEC, name))
    held = sum(p.nbytes for p in (made.gate_up.weight, made.down.weight) if p is not None)
    taken = held + made.gate_up.prepared_bytes + made.down.prepared_bytes
    scale_bytes = {"plain": 0, "int8": 2, "w8a8": 4}[name]
    least = numbers * (SCHEMES[name].weight_bytes or 2) + rows * scale_bytes
    # oneDNN fills its blocks up to 64 columns and 64 rows at most
    assert least <= taken <= 1.5 * least


@pytest.mark.parametrize("name", SCHEMES_HERE)
def test_a_token_does_not_depend_on_those_beside_it(name: str) -> None:
    """Up to the rounding of products with more rows, which may add up in another order."""
    made = prepare(layer(SPEC, name))
    x_TM = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(7)).bfloat16()
    together, _ = made(norm(), x_TM, None)
    for token in range(9):
        alone, _ = made(norm(), x_TM[token : token + 1], None)
        torch.testing.assert_close(alone[0], together[token], rtol=2**-6, atol=2**-6)


def test_float32_experts_stay_one_stack() -> None:
    made = prepare(layer(SPEC, "plain", dtype=torch.float32))
    assert made.gate_up.weight is not None
    assert made.gate_up.prepared_bytes == 0
