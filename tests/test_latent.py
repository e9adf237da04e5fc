"""Models with multi-head latent attention: what is kept of a token, trees, quantized weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.assembly import assemble
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.latent import LatentAttentionSpec, LatentSpec
from ridgeline.kernels.attention.expanded.cost import EXPANDED_BYTES, LEAST_TOKENS
from ridgeline.kernels.attention.paged.torch_ops import WORKSPACE_BYTES
from ridgeline.layers.linear import Linear
from ridgeline.models import model_config
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.footprint import kv_bytes_per_token, parameters
from ridgeline.weights.loader import read_model_config
from ridgeline.worker.state.expanding import expands
from ridgeline.worker.state.latent import PagedLatents
from tests import tiny_models
from tests.models.latent_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, DEEPSEEK_V32, GLM_4_7_FLASH
from tests.parallel.divided import kept, loaded, numbers_of
from tests.parallel.threads import on_ranks
from tests.weights.quantized_files import SCHEMES, quantize
from tests.worker.test_memory import activation_bytes

# Names → billions of parameters, and bytes of a token in 16 bits: layers times (512 + 64) numbers
SIZES = {
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15.7, 27 * 576 * 2),
    "deepseek-v3": (DEEPSEEK_V3, 671.0, 61 * 576 * 2),
    "glm-4.7-flash": (GLM_4_7_FLASH, 29.9, 47 * 576 * 2),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_token_is_kept_as_one_vector_on_however_many_ranks(name: str) -> None:
    config, billions, token = SIZES[name]
    model = model_config(config).spec
    assert parameters(model).total / 1e9 == pytest.approx(billions, abs=0.05)
    part = part_of(model, 4)
    for spec in (model, part):
        assert kv_bytes_per_token(spec, "bfloat16") == token
        [group] = spec.cache_groups
        assert group.spec == LatentSpec(width=576, rank=512)
    whole, own = (spec.layers[0].mixer for spec in (model, part))
    assert isinstance(whole, LatentAttentionSpec)
    assert isinstance(own, LatentAttentionSpec)
    assert (whole.num_heads, whole.rank) == (4 * own.num_heads, own.rank)


def test_parts_of_many_heads_and_drafts_are_planned_for() -> None:
    """With all of DeepSeek-V3's heads on a rank, 1,024 rows of 4 tokens: 2,048 items of 512 sums of 512 numbers."""
    model = model_config(DEEPSEEK_V3).spec
    few, many = (activation_bytes(model, max_tokens=1, max_seqs=1024, drafts=n) for n in (0, 3))
    logits = 3 * 4 * model.vocab_size * 3072
    assert many - few - logits == 2048 * (512 - 128) * 513 * 4
    assert many - 4 * logits / 3 > 2048 * 512 * 512 * 4


def test_keys_and_values_of_long_rows_are_planned_for() -> None:
    """Of 64 long rows, or of one that is longer than all that are gathered at once."""
    model = model_config(DEEPSEEK_V3).spec

    def planned(max_tokens: int, longest: int) -> int:
        return activation_bytes(model, max_tokens=max_tokens, longest=longest)

    assert planned(LEAST_TOKENS - 1, 1_000_000) == planned(LEAST_TOKENS - 1, 0)
    vectors = EXPANDED_BYTES // (576 * 2)
    short = 4 * 2 * 64 * 8192 + 8 * 3 * vectors + vectors * 576 * 2 + EXPANDED_BYTES
    long = (4 * 2 * 64 + 8 * 3) * 1_000_000 + 1_000_000 * 2 * (576 + 256)
    assert planned(8192, 8192) == planned(8192, 0)
    assert planned(8192, 1_000_000) - planned(8192, 8192) == long - short
    assert short > WORKSPACE_BYTES


def test_rows_of_150_tokens_are_expanded_on_hopper_alone() -> None:
    """Pairs against latents take longer there than their FLOPs say."""
    mixer: Any = model_config(DEEPSEEK_V3).spec.layers[0].mixer
    lengths = np.array([150]), np.array([8192])
    assert [bool(expands(*lengths, mixer, arch)[0]) for arch in ("sm_90", "", "sm_100")] == [True, False, False]


@pytest.mark.parametrize(("selected", "longest"), [(2048, 2048), (2048, 100_000), (2**24, 4096)])
def test_the_places_of_chosen_tokens_are_planned_for(selected: int, longest: int) -> None:
    """Also where no context is longer than what is chosen: a captured graph does not know that of its rows."""
    models = (model_config(each).spec for each in (DEEPSEEK_V3, {**DEEPSEEK_V32, "index_topk": selected}))
    dense, sparse = (activation_bytes(model, max_tokens=8192, longest=longest) for model in models)
    assert 8192 * 4 * min(selected, longest) < sparse - dense < 1 << 30


def test_no_tokens_are_chosen_where_a_context_has_room_for_no_more() -> None:
    """In a captured graph and with deterministic bits too, where every row's tokens would be."""
    mixer = model_config(DEEPSEEK_V32).spec.layers[0].mixer
    rows: Any = SimpleNamespace(kv_bound_R=None, num_tokens_R=None)
    group: Any = SimpleNamespace(ops=SimpleNamespace(deterministic=True), _block_size=16)
    assert isinstance(mixer, LatentAttentionSpec)
    assert PagedLatents._sparse_rows(group, mixer, rows, 129, np.zeros(3, bool)).all()
    assert not PagedLatents._sparse_rows(group, mixer, rows, 128, np.zeros(3, bool)).any()


@pytest.mark.few(3)
@pytest.mark.parametrize("query_rank", [128, None])
@pytest.mark.parametrize("name", ["fp8 blocks", "gptq", "awq"])
def test_quantized_latents_are_divided_in_their_form(name: str, query_rank: int | None, tmp_path: Path) -> None:
    """Ranks hold the queries of their heads, and all of what latents are made of. The projections of latents to keys
    and values, which multiply queries and results, are plain numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    heads = {
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }  # 192 rows of c, r
    if not query_rank:
        heads |= {"qk_nope_head_dim": 192}
    options: dict[str, Any] = {**sizes, **heads, "q_lora_rank": query_rank, "attention_bias": False}
    folder, _ = quantize("deepseek_v3", SCHEMES[name], tmp_path / "model", **options)
    whole, numbers = kept(folder, Mesh()), loaded(tmp_path / "model-plain", Mesh())
    for path, module in whole.named_modules():
        if isinstance(module, Linear) and module.fillings:
            plain = numbers.get_submodule(path).weight
            torch.testing.assert_close(numbers_of(module), plain, rtol=1e-6, atol=0)
    parts = on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))
    expand = whole.get_submodule("layers.0.mixer.expand").weight
    plain = loaded(tmp_path / "model-plain", Mesh()).get_submodule("layers.0.mixer.expand").weight
    torch.testing.assert_close(expand, plain, rtol=1e-6, atol=0)
    for path in ("layers.0.mixer.latent_in", *(["layers.1.mixer.query"] if query_rank else [])):
        module = whole.get_submodule(path)
        assert isinstance(module, Linear)
        assert any(filling.held for filling in module.fillings)
        own = [numbers_of(each.get_submodule(path)).split(each.get_submodule(path).parts) for each in parts]
        queries = torch.cat([each[0] for each in own]) if not query_rank or path.endswith("query") else own[0][0]
        torch.testing.assert_close(torch.cat([queries, *own[1][1:]]), numbers_of(module))
    expanded = [each.get_submodule("layers.0.mixer.expand").weight for each in parts]
    torch.testing.assert_close(torch.cat(expanded), expand)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16 is for keys and values"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the model's 4 attention heads"),
    ],
)
def test_what_latents_cannot_is_one_sentence(
    settings: dict[str, Any], sentence: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidConfig, match=rf"^{sentence}[^\n]*\.$"):
        assemble(LLMConfig(model=tiny_model("deepseek_v3"), device="cpu", dtype="float32", **settings))


def test_a_dense_model_of_latents_needs_no_experts(tmp_path: Path) -> None:
    tiny_models.save("deepseek_v2", tmp_path, first_k_dense_replace=3)
    assert all(layer.feed_forward.kind == "mlp" for layer in read_model_config(tmp_path).spec.layers)
