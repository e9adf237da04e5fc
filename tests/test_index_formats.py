"""The engine with index keys of 8 bits, beside which latents keep the activations' dtype: what they predict and hold,
what must not depend on how a request was run, and where else blocks with them go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.latent import LatentAttentionSpec, LatentSpec
from ridgeline.defaults import check_divided
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.models import model_config
from ridgeline.perf.footprint import kv_bytes_per_token
from ridgeline.perf.roofline import step_ops
from tests.driving import ask, rig
from tests.models.latent_configs import DEEPSEEK_V3, DEEPSEEK_V32
from tests.test_host_tier import PROMPTS as TIER_PROMPTS
from tests.test_host_tier import SIZE, twice
from tests.test_kv_cache_dtype import PROMPTS, prompt_logprobs

FAMILY, QUANTIZED = "deepseek_v32", ("fp8_e4m3", "fp8_e5m2", "int8")


def test_predictions_are_near_those_of_plain_keys(tiny_model: Callable[[str], Path]) -> None:
    """Where the least of ten choices changes, a tiny model notices; most predictions of int8 stay what they are."""
    found: dict[str, torch.Tensor] = {}
    for name in ("auto", *QUANTIZED):
        with rig(tiny_model(FAMILY), kv_cache_dtype=name, kv_cache_memory=1 << 22) as own:
            found[name] = torch.tensor(prompt_logprobs(own))
    spread = found["auto"].std()
    off = {name: ((found[name] - found["auto"]).abs().mean() / spread).item() for name in QUANTIZED}
    assert 0 < off["int8"] < off["fp8_e4m3"] < off["fp8_e5m2"] < 0.5
    assert off["int8"] < 0.1


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_predictions_do_not_depend_on_chunks_hits_or_ranks(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Every step chooses by the same levels, whoever wrote them."""
    seen = []
    for settings in ({"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 64}, {"tensor_parallel_size": 2}):
        with rig(tiny_model(FAMILY), kv_cache_dtype=name, kv_cache_memory=1 << 22, **settings) as own:
            seen.append(torch.tensor(prompt_logprobs(own)))
            own.run(ask("again", PROMPTS[3], max_tokens=9, logprobs=1))
            assert own.engine.scheduler.figures().hit_tokens > 40
            seen[-1] = torch.cat((seen[-1], torch.tensor([score for _, score in own.outcomes["again"].scored])))
    for other in seen[1:]:
        assert (other - seen[0]).abs().median() < 1e-4
        assert ((other - seen[0]).abs() > 1e-3).float().mean() < 0.05  # a level may be the next one


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fp8_e5m2", "int8"])
def test_blocks_come_back_from_the_host_and_the_disk(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """With their keys and scales: the same tokens, and few that run again."""
    folder, options = tiny_model(FAMILY), {"kv_cache_dtype": name, "max_model_len": 60}
    with rig(folder, kv_cache_memory=1 << 22, **options) as plain:
        expected = twice(plain)
        layout = plain.engine.layout
        small = (1 + 3 * layout.pages_needed(48, 32)) * layout.page_bytes
    disk: dict[str, Any] = {"kv_disk": tmp_path / "disk", "kv_disk_size": 1 / 32, "kv_cache_memory": small, **SIZE}
    for again in range(2):
        with rig(folder, **disk, **options) as own:
            assert twice(own) == expected
            tier = own.engine.scheduler.cache.tier
            assert tier is not None
            assert tier.disk is not None
            assert tier.counts.hit >= len(TIER_PROMPTS) // 2 * 30
            assert not again or tier.disk.counts.hit > 0
    with rig(folder, **disk, max_model_len=60) as other:  # keys of another format have other names
        twice(other)
        assert other.engine.scheduler.cache.tier is not None
        assert other.engine.scheduler.cache.tier.disk is not None
        assert other.engine.scheduler.cache.tier.disk.counts.hit == 0


def test_latents_stay_and_keys_are_counted_with_their_scales() -> None:
    plain = model_config(DEEPSEEK_V32).spec
    ours = plain.with_kv_format(kv_format("int8"))
    mixer = ours.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.states == (LatentSpec(width=576, rank=512, index_width=128, format=kv_format("int8")),)
    token = 576 * 2 + 128 + 2
    assert mixer.states[0].token_bytes("bfloat16") == token
    assert mixer.states[0].unit_bytes(64, "bfloat16") == 64 * token
    assert mixer.states[0].unit_bytes(1, "float32") % 16 == 0
    assert kv_bytes_per_token(ours, "bfloat16") == kv_bytes_per_token(plain, "int8") == 61 * token
    assert kv_bytes_per_token(plain, "bfloat16") == 61 * (576 + 128) * 2
    costs = []
    for spec, kv_dtype in ((plain, None), (ours, None), (plain, "fp8")):
        ops = step_ops(spec, StepShape([1], [65_536], 1), dtype="bfloat16", kv_dtype=kv_dtype)
        costs.append(next(op.cost.bytes for op in ops if op.name == "index_topk"))
    assert costs[1] == costs[2] == costs[0] - 65_536 * 126


def test_ranks_do_not_divide_what_an_indexer_chooses_from() -> None:
    check_divided(model_config(DEEPSEEK_V3).spec, torch.device("cpu"), 2)
    with pytest.raises(InvalidConfig, match=r"^prefill_context_parallel_size 2 does not divide .* an indexer .*\.$"):
        check_divided(model_config(DEEPSEEK_V32).spec, torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("config", "name", "sentence"),
    [
        (DEEPSEEK_V3, "bfloat16", "kv_cache_dtype bfloat16 is for keys and values, .*; use auto, .* for its latents."),
        (DEEPSEEK_V32, "bfloat16", "kv_cache_dtype bfloat16 is for keys and values, .* for its index keys."),
        ({**DEEPSEEK_V3, "kv_lora_rank": 511}, "fp8", "kv_cache_dtype fp8_e4m3 needs latents of even width, .* 511;"),
        (
            {**DEEPSEEK_V32, "index_head_dim": 129},
            "int8",
            "kv_cache_dtype int8 needs index keys of even width, .* 129;",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(config: dict[str, Any], name: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{sentence}"):
        model_config(config).spec.with_kv_format(kv_format(name))
