"""The price of latent attention: each row by the form in which it runs."""

from __future__ import annotations

import pytest

from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.kernels.attention.expanded.cost import expanded_attention_cost, expansion_cost
from ridgeline.kernels.attention.latent.cost import latent_attention_cost
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.models import model_config
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline, step_limit, step_ops
from tests.models.latent_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, DEEPSEEK_V32

LITE = model_config(DEEPSEEK_V2_LITE).spec
H200 = find("H200").attained()
HEADS = {"num_heads": 16, "key_dim": 128, "value_dim": 128}


def attention_of(*rows: tuple[int, int]) -> dict[str, Cost]:
    """The attention of one layer, in a step of rows with (new tokens, tokens in the cache after them)."""
    new, lengths = zip(*rows, strict=True)
    ops = step_ops(LITE, StepShape(new, lengths, len(rows)), dtype="bfloat16")
    return {op.name: op.cost for op in ops if op.name in ("latent_attention", "expanded_attention")}


def test_a_prompt_attends_to_keys_and_values_and_a_decoding_row_to_latents() -> None:
    found = attention_of((8192, 8192), (1, 3000), (1, 70))
    assert list(found) == ["expanded_attention", "latent_attention"]
    assert found["expanded_attention"] == expanded_attention_cost([8192], [8192], **HEADS, rope_dim=64, itemsize=2)
    assert found["latent_attention"] == latent_attention_cost(
        [1, 1], [3000, 70], num_heads=16, rank=512, rope_dim=64, itemsize=2
    )


@pytest.mark.parametrize(
    ("rows", "name"), [(((1, 5000), (4, 900)), "latent_attention"), (((500, 700),), "expanded_attention")]
)
def test_a_form_that_no_row_takes_is_no_op(rows: tuple[tuple[int, int], ...], name: str) -> None:
    assert list(attention_of(*rows)) == [name]


def test_keys_and_values_of_what_was_cached_are_made_again() -> None:
    """The product of the step's own tokens is an op by itself, whichever form attends."""
    whole, chunk = attention_of((2048, 2048)), attention_of((2048, 6144))
    pairs = 2048 * 4096  # which the chunk's queries see besides
    more = chunk["expanded_attention"].flops - whole["expanded_attention"].flops
    assert more == 2 * 16 * pairs * (192 + 128) + 2 * 4096 * 512 * 16 * 256
    read = 4096 * (16 * 256 + 64)  # keys, values and rotated parts
    made = 4096 * (512 + 16 * 256)
    assert chunk["expanded_attention"].bytes - whole["expanded_attention"].bytes == 2 * (read + made)
    tokens = {op.name: op.cost for op in step_ops(LITE, StepShape([2048], [6144], 1), dtype="bfloat16")}["expand"]
    assert tokens.flops == expansion_cost(2048, **HEADS, rank=512, itemsize=2).flops


def test_the_form_chosen_is_the_one_with_fewer_flops() -> None:
    """Queries are multiplied by as much as cached vectors are, so what differs is counted in the ops of attention."""
    for rows in [((128, 128),), ((200, 8192),), ((172, 100_000),), ((8192, 8192), (1000, 1100))]:
        new, lengths = zip(*rows, strict=True)
        latent = latent_attention_cost(new, lengths, num_heads=16, rank=512, rope_dim=64, itemsize=2)
        [(name, cost)] = attention_of(*rows).items()
        assert name == "expanded_attention"
        assert cost.flops < latent.flops


@pytest.mark.parametrize("config", [DEEPSEEK_V2_LITE, DEEPSEEK_V3], ids=["lite", "v3"])
@pytest.mark.parametrize("rows", [((1, 1),), ((1, 8192),) * 64, ((8192, 8192),), ((600, 900), (1, 4000), (90, 90))])
def test_the_fast_limit_knows_the_lengths_of_rows(config: dict[str, object], rows: tuple[tuple[int, int], ...]) -> None:
    model = model_config(config).spec
    at = StepShape([new for new, _ in rows], [length for _, length in rows], len(rows))
    slow = step_limit(step_ops(model, at, dtype="bfloat16"), H200, "bfloat16")
    assert Roofline(model, H200, "bfloat16").step_limit(at) == pytest.approx(slow, rel=1e-9)


def test_attention_to_latents_reads_what_is_cached() -> None:
    mixer = LITE.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    few, many = (attention_of((1, length))["latent_attention"].bytes for length in (1000, 9000))
    assert many - few == 8000 * mixer.width * 2


@pytest.mark.parametrize("rows", [((1, 1),), ((1, 8192),) * 64, ((8192, 8192),), ((600, 900), (1, 4000), (90, 2049))])
def test_the_fast_limit_knows_which_rows_are_sparse(rows: tuple[tuple[int, int], ...]) -> None:
    model = model_config(DEEPSEEK_V32).spec
    at = StepShape([new for new, _ in rows], [length for _, length in rows], len(rows))
    ops = step_ops(model, at, dtype="bfloat16")
    assert Roofline(model, H200, "bfloat16").step_limit(at) == pytest.approx(
        step_limit(ops, H200, "bfloat16"), rel=1e-9
    )
    names = {op.name for op in ops}
    assert ("index_topk" in names) == any(length > 2048 for _, length in rows)
    assert ("sparse_attention" in names) == any(length > 2048 > 128 > new for new, length in rows)
    assert ("latent_attention" in names) == any(length <= 2048 and new < 128 for new, length in rows)


def test_a_decoding_row_of_64k_reads_far_less_with_an_indexer() -> None:
    """Of 64 requests. Of each token 128 numbers are read to choose, and of 2,048 tokens the other 576."""
    at = StepShape([1] * 64, [65_536] * 64, 64)
    layers = [
        {op.name: op for op in step_ops(model_config(config).spec, at, dtype="bfloat16")}
        for config in (DEEPSEEK_V3, DEEPSEEK_V32)
    ]
    dense = layers[0]["latent_attention"].cost.bytes
    sparse = sum(layers[1][name].cost.bytes for name in ("index_keys", "index_topk", "sparse_attention"))
    assert 3.5 < dense / sparse < 4.5
