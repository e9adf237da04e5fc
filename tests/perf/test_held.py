"""Bytes and rates of quantized models, by the forms of their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.weight_format import CodedFormat, Fp8Format, Held, HeldMatrix
from ridgeline.perf.footprint import weight_bytes
from ridgeline.perf.hardware import find
from ridgeline.perf.held import held_precision
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import Roofline, op_rate, step_limit, step_ops
from ridgeline.weights.loader import read_model_config, stored_forms
from tests.perf.test_arithmetic import LLAMA2, MIXTRAL
from tests.weights.quantized_files import SCHEMES, quantize
from tests.weights.test_quantized import kept

BF16 = precision("bfloat16")
W4 = Held(format=CodedFormat(bits=4, group=128), scales="float16")
FP8 = Held(format=Fp8Format())
H200 = find("H200")


@pytest.mark.parametrize("name", ["gptq", "fp8 blocks", "ct w4 zeros", "ct int8"])
def test_the_bytes_of_a_model_are_those_that_it_takes(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("mixtral", SCHEMES[name], tmp_path / "model")
    config, forms = read_model_config(folder), stored_forms(folder, read_model_config(folder))
    p = held_precision(precision("float32"), config.spec, forms)
    assert weight_bytes(config.spec, p) == pytest.approx(kept(folder).weight_bytes, rel=1e-6)


def forms(held: Held, layers: int) -> dict[str, HeldMatrix]:
    """Down projections of some layers."""
    one = HeldMatrix(helds=(held,), rows=(4096,), inputs=11008)
    return {f"layers.{layer}.feed_forward.down": one for layer in range(layers)}


def test_matrices_of_towers_and_encoders_are_no_products_of_the_decoder() -> None:
    beside = forms(W4, 32) | {"tower.layers.0.up": HeldMatrix(helds=(W4,), rows=(576,), inputs=192)}
    assert held_precision(BF16, LLAMA2, beside) == held_precision(BF16, LLAMA2, forms(W4, 32))


def test_a_product_reads_its_weights_as_they_are_held() -> None:
    every = held_precision(BF16, LLAMA2, forms(W4, 32))
    shape = StepShape([1], [100], 1)
    plain, held = ({op.name: op for op in step_ops(LLAMA2, shape, dtype=p)} for p in (BF16, every))
    numbers = 4096 * 11008
    assert plain["down"].cost.bytes - held["down"].cost.bytes == pytest.approx(numbers * (2 - 0.5 - 2 / 128))
    assert plain["gate_up"].cost == held["gate_up"].cost
    half = held_precision(BF16, LLAMA2, forms(W4, 16))
    assert half.weight_of("down") == pytest.approx((2 + 0.5 + 2 / 128) / 2)
    assert Roofline(LLAMA2, H200, every).step_limit(shape) == pytest.approx(
        step_limit(step_ops(LLAMA2, shape, dtype=every), H200, every)
    )


@pytest.mark.parametrize(
    ("held", "each"),
    [
        (Held(format=CodedFormat(bits=4, group=32, values="e2m1"), scales="uint8"), 0.5 + 1 / 32),
        (Held(format=Fp8Format(block=True, activations="block")), 1 + 4 / 128**2),
    ],
    ids=["mxfp4", "fp8 blocks"],
)
def test_experts_read_codes_and_scales_of_those_that_have_tokens(held: Held, each: float) -> None:
    parts = {"gate_up": ((14_336, 14_336), 4096), "down": ((4096,), 14_336)}
    forms = {
        f"layers.{layer}.feed_forward.{name}": HeldMatrix(helds=(held,) * len(rows), rows=rows, inputs=inputs, copies=8)
        for name, (rows, inputs) in parts.items()
        for layer in range(len(MIXTRAL.layers))
    }
    for tokens, reached in ((1, 2.0), (4, 8 * (1 - 0.75**4))):
        shape = StepShape([1] * tokens, [100] * tokens, tokens)
        plain, less = (
            {op.name: op.cost for op in step_ops(MIXTRAL, shape, dtype=p)}
            for p in (BF16, held_precision(BF16, MIXTRAL, forms))
        )
        for name, (rows, inputs) in parts.items():
            saved = plain[f"grouped_{name}"].bytes - less[f"grouped_{name}"].bytes
            assert saved == pytest.approx(reached * sum(rows) * inputs * (2 - each))
            assert plain[f"grouped_{name}"].flops == less[f"grouped_{name}"].flops


def test_the_rate_is_that_of_most_layers_where_the_device_has_it() -> None:
    for count, rate in ((32, "fp8"), (10, "bfloat16")):
        p = held_precision(BF16, LLAMA2, forms(FP8, count))
        assert op_rate("down", H200, p) == H200.rate(rate)
    widened = held_precision(BF16, LLAMA2, forms(FP8, 32))
    a100 = find("A100")
    assert op_rate("down", a100, widened) == a100.rate("bfloat16")
    weights_only = held_precision(BF16, LLAMA2, forms(Held(format=Fp8Format(activations=None)), 32))
    assert op_rate("down", H200, weights_only) == H200.rate("bfloat16")


def test_an_output_layer_with_a_form_beside_its_table_adds_bytes() -> None:
    tied = replace(LLAMA2, tie_word_embeddings=True)
    table = HeldMatrix(helds=(W4,), rows=(LLAMA2.vocab_size,), inputs=4096, beside=True)
    p = held_precision(BF16, tied, {"unembed": table})
    assert weight_bytes(tied, p) - weight_bytes(tied, BF16) == pytest.approx(table.num_bytes(2))


def test_a_plan_has_room_for_more_requests() -> None:
    plans = [
        Plan(Deployment(model=LLAMA2, hardware=H200, input=1000, output=100, dtype=p))
        for p in (BF16, held_precision(BF16, LLAMA2, forms(W4, 32)))
    ]
    assert plans[0].weights - plans[1].weights == pytest.approx(32 * 4096 * 11008 * (2 - 0.5 - 2 / 128))
    assert plans[1].max_requests > plans[0].max_requests
