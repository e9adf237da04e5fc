"""A model whose weights are rounded, alone or with activations, next to itself in its own dtype."""

from __future__ import annotations

import inspect
import json
import math
import textwrap

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.assembly.choices import choose
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.op import Platform
from ridgeline.models import model_config
from ridgeline.perf.footprint import product_name, weight_bytes
from ridgeline.perf.hardware import find
from ridgeline.perf.held import held_alike
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import op_rate
from ridgeline.quantization import SCHEMES
from ridgeline.weights.folder import EMBEDDED_MODEL

QUANTIZATIONS = [name for name in SCHEMES if name != "plain"]
MOVES = {"w4a16": 0.3, "fp8": 0.05, "fp8-block": 0.05}  # how far a perplexity may go
TEXT = inspect.getsource(textwrap)[2000:4000]  # the embedded model writes Python


def negative_log_likelihood(**options: object) -> tuple[float, float]:
    """Nats per token of TEXT, and the bytes of weights that the engine's limits know of, relative to what they take."""
    llm = LLM(device="cpu", max_model_len=1024, **options)
    try:
        [result] = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        tokens, entries = result.prompt_token_ids, result.prompt_logprobs
        nats = [entry[token].logprob for entry, token in zip(entries[1:], tokens[1:], strict=True)]
        known = weight_bytes(llm.assembly.model.spec, llm.assembly.precision)
        decoder = llm.assembly.worker._runner.decoder
        if decoder.unembed.weight is None:
            known += decoder.unembed.prepared_bytes  # some CPUs pack products, and then hold a tied table twice
        return -sum(nats) / len(nats), known / llm.assembly.memory.weights
    finally:
        llm.shutdown()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_rounding_keeps_the_embedded_models_perplexity(quantization: str) -> None:
    """In int8 a weight errs by up to 1/254 of its row's largest, about 1 % of a typical one, at random: far below what
    moves a perplexity by 2 %. So does an activation, of its token's. In E4M3 both err by up to 1/16 of themselves, and
    in four bits a weight by up to 1/16 of its group's largest."""
    if not SCHEMES[quantization].supports(Platform(device_type="cpu")):
        pytest.skip(f"this machine has not what {quantization} needs")
    plain, all_known = negative_log_likelihood()
    rounded, known = negative_log_likelihood(quantization=quantization)
    assert rounded != plain
    assert all_known == pytest.approx(1, abs=0.01)
    if not quantization.startswith("fp8"):  # of which a CPU keeps plain numbers
        assert known == pytest.approx(1, abs=0.1)  # scales are not counted, nor the zeros of groups
    assert math.exp(rounded - plain) == pytest.approx(1, abs=MOVES.get(quantization, 0.02))


@pytest.mark.parametrize(("name", "size"), [("fp8", 4.0), ("w4a16", 0.5), ("int8", 1.0), (None, 4.0)])
def test_limits_of_a_step_know_what_products_read(name: str | None, size: float) -> None:
    """A CPU keeps plain numbers of FP8."""
    choices = choose(LLMConfig(quantization=name, dtype="float32"), torch.device("cpu"))
    known, spec = choices.precision, choices.model.spec
    products = spec.layers[0].products(spec.hidden_size).items()
    assert {known.weight_of(product_name(*each)) for each in products} == {size}
    assert (known.item, known.rate_of("qkv", known.product_rate)) == (4.0, "float32")


def test_weights_are_widened_where_a_device_has_no_units_for_them() -> None:
    model = model_config(json.loads((EMBEDDED_MODEL / "config.json").read_text())).spec
    rounded = held_alike(precision("bfloat16"), model, 1.0, "fp8")
    for device, rate in (("A100-80GB", "bfloat16"), ("H200", "fp8")):
        hardware = find(device)
        assert op_rate("qkv", hardware, rounded) == hardware.rate(rate)
        assert op_rate("unembed", hardware, rounded) == hardware.rate("bfloat16")


def test_w8a8_is_refused_where_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(
        InvalidConfig, match=r"VNNI, or with AVX2 and a C\+\+ compiler, and the device \(cpu\) is none; use int8"
    ):
        LLM(quantization="w8a8", device="cpu")


def test_what_cannot_be_quantized_is_said() -> None:
    with pytest.raises(InvalidConfig, match="int3"):
        LLM(quantization="int3")
