"""The engine with latents of 8 bits: what it predicts and holds, what must not depend on how a request was run, and
where else blocks with them go."""

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
from ridgeline.weights.quantized.kv_scales import cached_as
from ridgeline.worker.state import expanding
from tests.driving import ask, rig
from tests.models.latent_configs import DEEPSEEK_V3
from tests.test_draft_trees import DEPTH, Always, Told, check_same, medusa_of, plain, requests, texts_of, trees
from tests.test_host_tier import SIZE, twice
from tests.test_kv_cache_dtype import PROMPTS, prompt_logprobs

TinyModel = Callable[[str], Path]
QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["deepseek_v2", "kimi_linear", "minicpm3"])
def test_predictions_are_near_those_of_plain_latents(family: str, tiny_model: TinyModel) -> None:
    found: dict[str, torch.Tensor] = {}
    for name in ("auto", *QUANTIZED):
        with rig(tiny_model(family), kv_cache_dtype=name, kv_cache_memory=1 << 22) as own:
            found[name] = torch.tensor(prompt_logprobs(own))
    spread = found["auto"].std()
    off = {name: ((found[name] - found["auto"]).abs().mean() / spread).item() for name in QUANTIZED}
    assert 0 < off["int8"] < off["fp8_e4m3"] < off["fp8_e5m2"] < 0.2
    assert off["int8"] < 0.02


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_predictions_do_not_depend_on_chunks_hits_or_ranks(name: str, tiny_model: TinyModel) -> None:
    """Every step attends to the same levels, whoever wrote them."""
    seen = []
    for settings in ({"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 64}, {"tensor_parallel_size": 2}):
        with rig(tiny_model("deepseek_v3"), kv_cache_dtype=name, kv_cache_memory=1 << 22, **settings) as own:
            seen.append(torch.tensor(prompt_logprobs(own)))
            own.run(ask("again", PROMPTS[3], max_tokens=9, logprobs=1))
            assert own.engine.scheduler.figures().hit_tokens > 40
            seen[-1] = torch.cat((seen[-1], torch.tensor([score for _, score in own.outcomes["again"].scored])))
    for other in seen[1:]:
        assert (other - seen[0]).abs().median() < 1e-4
        assert ((other - seen[0]).abs() > 1e-3).float().mean() < 0.05  # a level may be the next one


@pytest.mark.dealt
def test_nodes_that_stay_keep_their_levels_and_scales(tiny_model: TinyModel, tmp_path: Path) -> None:
    """All three parts of a token move, or later tokens would attend to others."""
    folder, levels = tiny_model("deepseek_v2"), {"kv_cache_dtype": "int8"}
    want, settings = plain(folder, **levels), medusa_of(folder, tmp_path / "heads")
    with rig(folder, max_num_batched_tokens=64, **settings, **levels) as own:
        Told(trees(own, Always), texts_of(requests(0), want))
        check_same(own.run(*requests(own.runner.decoder.spec.vocab_size)), want)
        counts = own.engine.scheduler.figures().drafts
        assert not own.errors
    assert counts is not None
    assert counts["accepted_tokens"] > 30
    assert counts[f"accepted_tokens_per_pos: {DEPTH - 1}"] > 0


@pytest.mark.dealt
def test_blocks_come_back_from_the_host_and_the_disk(tiny_model: TinyModel, tmp_path: Path) -> None:
    """With their scales, and under names of their format."""
    folder, options = tiny_model("deepseek_v3"), {"kv_cache_dtype": "fp8", "max_model_len": 60}
    with rig(folder, kv_cache_memory=1 << 22, **options) as whole:
        expected = twice(whole)
        layout = whole.engine.layout
        small = (1 + 3 * layout.pages_needed(48, 32)) * layout.page_bytes
    disk: dict[str, Any] = {"kv_disk": tmp_path / "disk", "kv_disk_size": 1 / 32, "kv_cache_memory": small, **SIZE}
    for again, format_ in enumerate((options, options, {"max_model_len": 60})):
        with rig(folder, **disk, **format_) as own:
            found = twice(own)
            tier = own.engine.scheduler.cache.tier
            assert tier is not None
            assert tier.disk is not None
            hits = tier.disk.counts.hit
            assert again == 2 or found == expected
            assert (hits > 0) is (again == 1)  # plain latents have other names


def test_a_token_takes_its_levels_its_scale_and_its_rotated_part() -> None:
    before = model_config(DEEPSEEK_V3).spec
    ours = before.with_kv_format(kv_format("fp8"))
    mixer = ours.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.states == (LatentSpec(width=576, rank=512, format=kv_format("fp8")),)
    token = 512 + 2 + 64 * 2
    assert mixer.states[0].token_bytes("bfloat16") == token
    assert mixer.states[0].unit_bytes(64, "bfloat16") == 64 * token
    assert mixer.states[0].unit_bytes(1, "bfloat16") % 16 == 0
    assert kv_bytes_per_token(ours, "bfloat16") == kv_bytes_per_token(before, "fp8") == 61 * token
    assert kv_bytes_per_token(before, "bfloat16") == 61 * 576 * 2
    costs = []
    for spec, kv_dtype in ((before, None), (ours, None), (before, "fp8")):
        ops = {
            op.name: op.cost.bytes
            for op in step_ops(spec, StepShape([1], [65_536], 1), dtype="bfloat16", kv_dtype=kv_dtype)
        }
        costs.append((ops["latent_attention"], ops["latent_kv"]))
    assert costs[1] == costs[2] == (costs[0][0] - 65_536 * 510, costs[0][1] - 510)


def test_ranks_do_not_divide_latents_of_8_bits() -> None:
    """Also where a checkpoint asks for them and no setting does."""
    config = {"kv_cache_quant_algo": "FP8", "quant_method": "modelopt"}
    spec = cached_as(model_config(DEEPSEEK_V3).spec, kv_format("auto"), config, {}, None)
    with pytest.raises(InvalidConfig, match=r"^prefill_context_parallel_size 2 and a cache of 8 bits do not go .*\.$"):
        check_divided(spec, torch.device("cpu"), 2)


def test_keys_and_values_of_long_rows_are_made_of_levels(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row attends to the same numbers, whether its queries are multiplied or its latents are, also behind others."""
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(expanding, "worth_expanding", lambda tokens_R, kv_len_R, **_: tokens_R >= 3)
            monkeypatch.setattr(expanding, "EXPANDED_BYTES", 4096)
        with rig(
            tiny_model("deepseek_v3"), kv_cache_dtype="int8", kv_cache_memory=1 << 22, max_num_batched_tokens=24
        ) as own:
            found.append(torch.tensor(prompt_logprobs(own)))
    assert (found[1] - found[0]).abs().median() < 1e-4
    assert ((found[1] - found[0]).abs() > 1e-3).float().mean() < 0.05  # a level may be the next one
    assert not torch.equal(*found)
