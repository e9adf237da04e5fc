"""Each op of a step is timed with the arguments the real worker gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.model import MLPSpec, ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.explain import JOINT
from ridgeline.perf.roofline import step_ops
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.machine.probes import cpu_threads
from ridgeline_bench.profile.made_plan import layout_for, made_plan
from ridgeline_bench.profile.ops import Recorded, measure_step_ops, record_step

CPU = torch.device("cpu")
MIXED = StepShape([7, 1, 1], [20, 33, 5], 2)
DECODE = StepShape([1, 1], [33, 5], 2)


@pytest.fixture
def spec(tiny_model: Callable[[str], Path]) -> Callable[[str], ModelSpec]:
    def found(family: str) -> ModelSpec:
        if family == "shared experts":
            return with_shared_experts(found("qwen3"))
        return read_model_config(tiny_model(family)).spec

    return found


def with_shared_experts(dense: ModelSpec) -> ModelSpec:
    """The model with a mixture in its last layer: experts, one that all tokens share, and its gate."""
    mixture = ExpertsSpec(
        routing=RoutingSpec(experts=6, top_k=2),
        intermediate_size=40,
        shared=MLPSpec(intermediate_size=56),
        shared_gate=True,
    )
    *first, last = dense.layers
    return replace(dense, layers=(*first, replace(last, feed_forward=mixture)))


def one(calls: list[Recorded], name: str) -> Recorded:
    [call] = [call for call in calls if call.name == name]
    return call


def test_arguments_have_the_steps_shape(spec: Callable[[str], ModelSpec]) -> None:
    calls = record_step(spec("llama"), MIXED, CPU, "float32")
    assert one(calls, "mixer_norm + qkv").arguments[0].x_TI.shape == (9, 64)
    assert one(calls, "final_norm + unembed").arguments[0].x_TI.shape == (3, 64)
    batch = one(calls, "attention").arguments[3]
    assert batch.kv_len_R.tolist() == [20, 33, 5]
    assert batch.num_tokens_R.tolist() == [7, 1, 1]


def test_rows_read_blocks_of_their_own_full_of_numbers(spec: Callable[[str], ModelSpec]) -> None:
    calls = record_step(spec("llama"), MIXED, CPU, "float32")
    _, k_cache, _, batch = one(calls, "attention").arguments[:4]
    used = [batch.block_table_SC[slot, : -(-length // 16)].tolist() for slot, length in enumerate([20, 33, 5])]
    ids = [block for row in used for block in row]
    assert len(set(ids)) == len(ids) == 6
    assert 0 not in ids
    assert k_cache[ids].std() > 0.5


def test_equal_layers_are_run_once_and_unlike_ones_each(spec: Callable[[str], ModelSpec]) -> None:
    def attentions(family: str) -> int:
        return sum(call.name == "attention" for call in record_step(spec(family), MIXED, CPU, "float32"))

    assert attentions("llama") == 1
    assert attentions("mixed") == 2


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "mixed"])
def test_a_fresh_copy_gives_the_same_result(spec: Callable[[str], ModelSpec], family: str) -> None:
    for call in record_step(spec(family), MIXED, CPU, "float32"):
        again, fresh = call.again(fresh=False)(), call.again(fresh=True)()
        if isinstance(again, torch.Tensor):
            assert torch.equal(again, fresh), call.name


def test_a_fresh_copy_writes_elsewhere(spec: Callable[[str], ModelSpec]) -> None:
    call = one(record_step(spec("llama"), MIXED, CPU, "float32"), "rope + write_kv")
    fresh, cache = call.again(fresh=True), call.arguments[0].k_cache_NGPD
    with torch.inference_mode():
        cache.zero_()
        fresh()
        assert not cache.any()
        call.again(fresh=False)()
        assert cache.any()


def test_a_long_row_of_latents_attends_to_keys_and_values(spec: Callable[[str], ModelSpec]) -> None:
    model = spec("deepseek_v2")
    wide = {layer.mixer: replace(layer.mixer, rank=64) for layer in model.layers}  # so that rows are worth expanding
    model = replace(model, layers=tuple(replace(layer, mixer=wide[layer.mixer]) for layer in model.layers))
    shape = StepShape([1, 200], [30, 200], 2)
    calls = record_step(model, shape, CPU, "float32")
    priced = {op.name for op in step_ops(model, shape, dtype="float32")}
    assert {"latent_attention", "expanded_attention"} <= priced & {call.name for call in calls}


def test_more_tokens_take_more_time(spec: Callable[[str], ModelSpec]) -> None:
    with cpu_threads(1):  # threads that wait for each other on a busy machine would hide the difference
        few = measure_step_ops(spec("llama"), StepShape([2], [8], 1), CPU, "float32")
        many = measure_step_ops(spec("llama"), StepShape([240], [240], 1), CPU, "float32")
    assert few.keys() == many.keys()
    assert many["down"] > few["down"] > 0
    assert many["attention"] > few["attention"] > 0


@pytest.mark.parametrize("shape", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2", "qwen3", "gpt2", "mistral", "mixed", "qwen3_moe", "shared experts"),
        *("qwen3_5", "mamba2", "jamba", "nemotron_h"),
    ],
)
def test_ops_are_named_as_in_the_cost_model(spec: Callable[[str], ModelSpec], family: str, shape: StepShape) -> None:
    calls = record_step(spec(family), shape, CPU, "float32")
    parts = {part for call in calls for part in call.name.split(JOINT)}
    assert parts == {op.name for op in step_ops(spec(family), shape, dtype="float32")}


def test_a_decode_steps_attention_is_one_op_over_a_full_cache(spec: Callable[[str], ModelSpec]) -> None:
    call = one(record_step(spec("llama"), DECODE, CPU, "float32"), "rope + write_kv + attention")
    assert call.arguments[0].k_cache_NGPD.std() > 0.5


def test_a_state_takes_one_block_at_any_context(spec: Callable[[str], ModelSpec]) -> None:
    """And a window as many as it has; the rest of the table names the null block."""
    shape = StepShape([1, 3], [100_000, 50_000], 2)
    assert layout_for(spec("mamba2"), shape, "float32", 16).num_pages == 1 + 2
    layout = layout_for(spec("qwen3_5"), shape, "float32", 16)
    plan = made_plan(spec("qwen3_5"), shape, layout)
    for table, length, count in ((plan.deltas[0], 100_000, 1), (plan.deltas[1], 50_000, 3)):
        for group, blocks in zip(layout.groups, table.blocks, strict=True):
            used = [n for n, block in enumerate(blocks) if block]
            if group.spec.exact:
                assert set(used) == {(length - count - 1) // 16, (length - 1) // 16}
                assert len({blocks[n] for n in used}) == 1
            else:
                assert used == list(range(-(-length // 16)))


def test_the_norm_that_counts_adds_a_residual(spec: Callable[[str], ModelSpec]) -> None:
    assert (
        one(record_step(spec("llama"), MIXED, CPU, "float32"), "mixer_norm + qkv").arguments[0].residual_TI is not None
    )
