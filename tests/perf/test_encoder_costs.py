"""The cost of an encoder: torch counts the same FLOPs while transformers' model runs, and everything that predicts a
step's time knows of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.plan.step import RowKind, Rows
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.engine.itl import FIRST_GUESS, ItlBound
from ridgeline.engine.price import price_of
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.rows import Feature
from ridgeline.models import model_config
from ridgeline.perf.footprint import kv_bytes, weight_bytes
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import ENCODER, PRODUCTS, Roofline, step_ops
from ridgeline.simulation.setup import Settings, Setup
from tests import encoder_decoders as oracle
from tests.models.encoder_decoder_configs import FLAN_T5_BASE

H200 = find("H200").attained()
ATTENTIONS = ("attention", "packed_attention", "cross_attention", "unembed")


def t5() -> ModelSpec:
    return model_config(FLAN_T5_BASE).spec


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """A prompt of 50 tokens, and the decoder's first token behind it. torch counts no biases: one addition in 120."""
    model, tokens = oracle.build(family), 50
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.full((1, tokens), 9), decoder_input_ids=torch.tensor([[5]]))
    spec = model_config({**model.config.to_dict(), "architectures": [type(model).__name__]}).spec
    shape = StepShape([1], [1], 1, encoded=[tokens], crossed_R=[tokens])
    found = {op.name: 0.0 for op in step_ops(spec, shape, dtype="float32")}
    for op in step_ops(spec, shape, dtype="float32"):
        found[op.name] += op.count * op.cost.flops
    counted = sum(f for name, f in found.items() if name.removeprefix(ENCODER) in (*PRODUCTS, *ATTENTIONS))
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_step_with_an_encoder_input_reads_its_weights_once() -> None:
    model, p = t5(), precision("bfloat16")
    ops = step_ops(model, StepShape([1], [1], 1, encoded=[1], crossed_R=[1]), dtype=p)
    table = 2 * model.vocab_size * model.hidden_size  # of which it reads two rows
    assert weight_bytes(model, p) - table == pytest.approx(sum(op.count * op.cost.bytes for op in ops), rel=0.01)
    assert not any(op.name.startswith(ENCODER) for op in step_ops(model, StepShape([1], [9], 1), dtype=p))


def test_plans_count_the_encoder_and_the_memory_of_its_output() -> None:
    short, long = (
        Plan(Deployment(model=t5(), hardware=H200, input=tokens, output=64, dtype="bfloat16"))
        for tokens in (512, 16384)
    )
    model = Roofline(t5(), H200, "bfloat16")
    first = model.step_limit(StepShape([1], [1], 1, encoded=[16384], crossed_R=[16384]))
    assert long.prompt.total == pytest.approx(first)
    assert long.prompt.total > 5 * short.prompt.total
    a_token = 2 * 12 * 64 * 12 * 2  # keys and values of 12 heads of 64 in 12 layers, two bytes each
    assert long.kv_per_request == a_token * (16384 + 80)  # the answer's 65 in blocks of 16
    assert kv_bytes(t5(), 65, "bfloat16", encoded=100) == a_token * 165
    assert long.chunked(64, 4).steps == 1  # no input is cut


def test_schedulers_price_encoder_inputs_and_bound_them() -> None:
    config = EngineConfig(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=2048, encodes=2048)
    model = Roofline(t5(), H200, "bfloat16")
    price = price_of(model, config)
    encoder = 1e3 * (
        model.step_limit(StepShape([1], [1], 1, encoded=[2048])) - model.step_limit(StepShape([1], [1], 1))
    )
    assert price.prompt(2048) == pytest.approx(encoder, rel=0.01)
    rows = Rows(
        slots_R=np.arange(2),
        generations_R=np.zeros(2),
        kinds_R=np.array([RowKind.TOKEN, RowKind.CHUNK]),
        num_tokens_R=np.ones(2),
        num_logits_R=np.ones(2),
        tokens_each=1,
        features=Feature(0),
        num_logprobs=0,
        encoded_R=np.array([0, 2048]),
    )
    assert price.of_rows(rows, np.array([40, 1]))[1] == pytest.approx(encoder + price.prompt(1), rel=0.01)
    bound = ItlBound(2e-3, model, encodes=True)
    decoding = np.full(8, 40)
    fits = bound.prompt_tokens(decoding, 0, 100_000)
    seconds = [
        FIRST_GUESS * model.step_limit(StepShape([1] * 9, [40] * 8 + [1], 9, encoded=[tokens]))
        for tokens in (fits, fits + 512)
    ]
    assert seconds[0] <= 2e-3 < seconds[1]


def test_a_simulated_engine_reads_prompts_with_the_encoder() -> None:
    setup = Setup(t5(), H200, "bfloat16", Settings())
    assert setup.config.encodes == 512
    plain, encoded = StepShape([1], [1], 1), StepShape([1], [1], 1, encoded=[512])
    assert setup.times.seconds(encoded) > setup.times.seconds(plain) + 1e-5


def test_explain_lists_the_encoder(tmp_path) -> None:
    folder = oracle.save("t5", tmp_path)
    result = CliRunner().invoke(app, ["explain", str(folder), "--gpu", "H200", "--prefill", "90"])
    assert result.exit_code == 0, result.output
    for name in ("encoder.qkv", "encoder.packed_attention", "encoder.kv", "cross_attention"):
        assert name in result.output
