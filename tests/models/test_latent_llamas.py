"""Kimi Linear, MiniCPM3 and Youtu-LLM: their configs in every spelling, their tensors under every name, and what they
have in common with transformers that no forward pass of a tiny model shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.linear import DeltaAttentionSpec
from ridgeline.core.specs.state import RecurrentSpec
from ridgeline.models import model_config
from ridgeline.models.kimi_linear import LAYER_TYPES
from tests import tiny_models
from tests.models.latent_llamas import FULL, KIMI_LINEAR_48B, LATENT_LLAMAS, MINICPM3_4B, YOUTU_LLM_2B
from tests.models.test_decoder import dense_logits, load, some_ids
from tests.weights.quantized_files import SCHEMES, quantize

LINEAR: dict[str, Any] = KIMI_LINEAR_48B["linear_attn_config"]


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**LINEAR, **changes}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("kimi_linear", {"linear_attn_config": [1]}, r"linear_attn_config to .1.; it must be an object"),
    ("kimi_linear", linear(head_dim=0), r"linear_attn_config.head_dim to 0; it must be a whole number"),
    ("kimi_linear", linear(num_heads="32"), r"linear_attn_config.num_heads to '32'; it must be a whole number"),
    ("kimi_linear", linear(num_heads=2**24), r"linear_attn_config.num_heads to 16777216; .*less, since a state has at"),
    ("kimi_linear", linear(short_conv_kernel_size=1), r"short_conv_kernel_size to 1; .* at least 2"),
    ("kimi_linear", linear(short_conv_kernel_size=5000), r"short_conv_kernel_size to 5000; it must be at most 1024"),
    ("kimi_linear", linear(kda_layers="1-3"), r"linear_attn_config.kda_layers to '1-3'; it must be a list of the numb"),
    ("kimi_linear", linear(kda_layers=None), r"linear_attn_config.kda_layers to None; it must be a list of the numbe"),
    ("kimi_linear", linear(full_attn_layers=[4.0]), r"full_attn_layers to .4.0.; it must be a list of the numbers"),
    ("kimi_linear", linear(full_attn_layers=[0, *FULL[1:]]), r"kda_layers to .*; it must be the numbers from 1 to 27"),
    ("kimi_linear", linear(kda_layers=list(range(1, 28))), r"kda_layers to .*; it must be the numbers from 1 to 27"),
    ("kimi_linear", {"num_hidden_layers": 28}, r"kda_layers to .*; it must be the numbers from 1 to 28 that"),
    ("kimi_linear", {"layer_types": ["linear_attention"]}, r"layer_types to .*; it must be 27 entries, each linear_"),
    ("kimi_linear", {"mlp_layer_types": ["dense", "moe"]}, r"mlp_layer_types to .*; it must be 27 entries, each dense"),
    ("kimi_linear", {"num_experts_per_token": 257}, r"num_experts_per_token to 257; it must be at most the 256 of nu"),
    ("kimi_linear", {"num_experts_per_token": "8"}, r"num_experts_per_token to '8'; it must be a whole number"),
    ("kimi_linear", {"num_expert_group": 3}, r"num_expert_group to 3; it must be a divisor of the 256 of num_experts"),
    ("kimi_linear", {"topk_group": 2}, r"topk_group to 2; it must be at most the 1 of num_expert_group"),
    ("kimi_linear", {"num_shared_experts": -1}, r"num_shared_experts to -1; it must be a whole number of at least 0"),
    ("kimi_linear", {"moe_renormalize": "yes"}, r"moe_renormalize to 'yes'; it must be true or false"),
    ("kimi_linear", {"routed_scaling_factor": 0}, r"routed_scaling_factor to 0; it must be a number above 0"),
    ("kimi_linear", {"model_max_length": None}, r"has no model_max_length"),
    ("kimi_linear", {"model_max_length": 0}, r"model_max_length to 0; it must be a whole number"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, r"activation_func to 'softmax'; it must be sigmoid"),
    ("kimi_linear", {"mla_use_nope": False}, r"mla_use_nope to False; it must be true or left out"),
    ("kimi_linear", {"mla_use_nope": 1}, r"mla_use_nope to 1; it must be true or false"),
    ("kimi_linear", {"hidden_act": "gelu"}, r"hidden_act to 'gelu'; it must be silu"),
    ("kimi_linear", {"tie_word_embeddings": True}, r"tie_word_embeddings to True, which is not supported"),
    ("kimi_linear", {"attn_res_block_size": 12}, r"attn_res_block_size to 12, .*residuals are plain sums here"),
    ("kimi_linear", linear(gate_lower_bound=-5.0), r"gate_lower_bound to -5.0, .*no lower bound here"),
    ("kimi_linear", {"attention_bias": True}, r"attention_bias without q_lora_rank"),
    ("minicpm3", {"scale_emb": 0}, r"scale_emb to 0; it must be a number above 0"),
    ("minicpm3", {"scale_depth": "deep"}, r"scale_depth to 'deep'; it must be a number above 0"),
    ("minicpm3", {"dim_model_base": 0.5}, r"dim_model_base to 0.5; it must be a whole number"),
    ("minicpm3", {"num_attention_heads": 41}, r"hidden_size 2560, which its 41 heads do not divide"),
    ("minicpm3", {"mlp_bias": "no"}, r"mlp_bias to 'no'; it must be true or false"),
    ("minicpm3", {"kv_lora_rank": None}, r"has no kv_lora_rank"),
    ("youtu", {"rope_interleave": "yes"}, r"rope_interleave to 'yes'; it must be true or false"),
    ("youtu", {"q_lora_rank": 0}, r"q_lora_rank to 0; it must be a whole number of at least 1"),
    ("youtu", {"v_head_dim": None}, r"has no v_head_dim"),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_these_families_do_not_have_is_refused_in_one_sentence(
    kind: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        model_config({**LATENT_LLAMAS[kind], **changes})
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("kind", LATENT_LLAMAS)
def test_absent_entries_take_transformers_defaults(kind: str) -> None:
    given = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    given += ("num_attention_heads", "num_key_value_heads")
    config = {name: value for name, value in LATENT_LLAMAS[kind].items() if name in given}
    ours, oracle = model_config(config).spec, transformers.AutoConfig.for_model(**config)
    mixer = next(layer.mixer for layer in ours.layers if isinstance(layer.mixer, LatentAttentionSpec))
    assert (mixer.rank, mixer.query_rank) == (oracle.kv_lora_rank, oracle.q_lora_rank or 0)
    assert (mixer.key_dim, mixer.rope_dim) == (oracle.qk_nope_head_dim, oracle.qk_rope_head_dim)
    assert mixer.value_dim == oracle.v_head_dim
    assert ours.final_norm.eps == oracle.rms_norm_eps
    assert ours.max_position_embeddings == oracle.max_position_embeddings
    assert ours.tie_word_embeddings == oracle.tie_word_embeddings
    if kind != "kimi_linear":
        return
    assert ["full_attention" if layer.mixer == mixer else "linear_attention" for layer in ours.layers] == (
        oracle.layer_types
    )
    delta = ours.layers[0].mixer
    assert isinstance(delta, DeltaAttentionSpec)
    assert (delta.heads, delta.head_dim) == (oracle.linear_num_heads, oracle.linear_head_dim)
    assert delta.length == oracle.linear_conv_kernel_dim
    mixtures = [layer.feed_forward for layer in ours.layers]
    assert ["sparse" if isinstance(each, ExpertsSpec) else "dense" for each in mixtures] == oracle.mlp_layer_types
    experts = mixtures[-1]
    assert isinstance(experts, ExpertsSpec)
    assert experts.routing.experts == oracle.num_local_experts
    assert experts.routing.top_k == oracle.num_experts_per_tok
    assert experts.routing.scale == oracle.routed_scaling_factor
    assert experts.routing.renormalize == oracle.norm_topk_prob
    assert experts.routing.groups == oracle.n_group
    assert experts.intermediate_size == oracle.moe_intermediate_size


def test_what_transformers_saves_of_kimi_linear_says_the_same() -> None:
    """It writes types of layers beside what the config had, and so do files without `linear_attn_config`."""
    published = model_config(KIMI_LINEAR_48B).spec
    types = [LAYER_TYPES[layer in FULL] for layer in range(1, 28)]
    saved = {**KIMI_LINEAR_48B, "layer_types": types, "mlp_layer_types": ["dense"] + ["sparse"] * 26}
    saved |= {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    assert model_config(saved).spec == published
    assert model_config({**saved, "linear_attn_config": None, "first_k_dense_replace": 5}).spec == published
    for ours, theirs in (("num_experts_per_tok", "num_experts_per_token"), ("n_group", "num_expert_group")):
        other = {name: value for name, value in KIMI_LINEAR_48B.items() if name != theirs}
        assert model_config({**other, ours: KIMI_LINEAR_48B[theirs]}).spec == published


def test_kimi_linear_has_plain_feed_forwards_where_the_config_says_so() -> None:
    kinds = ["dense", "sparse"] * 13 + ["dense"]
    for config in ({"mlp_layer_types": kinds}, {"num_experts": None}, {"first_k_dense_replace": 27}):
        layers = model_config({**KIMI_LINEAR_48B, **config}).spec.layers
        sparse = [isinstance(layer.feed_forward, ExpertsSpec) for layer in layers]
        assert sparse == ([kind == "sparse" for kind in kinds] if "mlp_layer_types" in config else [False] * 27)


def test_kimi_linear_rotates_nothing_and_keeps_states_in_float32() -> None:
    spec = model_config({**KIMI_LINEAR_48B, "rope_scaling": {"type": "yarn", "factor": 4.0}}).spec
    assert all(layer.mixer.rope is None for layer in spec.layers)
    assert spec.max_position_embeddings == 1048576
    [state] = spec.layers[0].mixer.states
    assert isinstance(state, RecurrentSpec)
    assert state.parts[-1].num_bytes("bfloat16") == 4 * 32 * 128 * 128


def test_minicpm3_has_multipliers_unless_they_are_null() -> None:
    spec = model_config(MINICPM3_4B).spec
    numbers = dict(rope.scaling or ()) if (rope := spec.layers[0].mixer.rope) else {}
    assert (numbers["rope_type"], numbers["short_magnitude"], numbers["long_magnitude"]) == ("longrope", 1.0, 1.0)
    assert {layer.residual_multiplier for layer in spec.layers} == {1.4 / math.sqrt(62)}
    assert (spec.embedding_multiplier, spec.logits_multiplier) == (12.0, 0.1)
    assert spec.tie_word_embeddings
    none = model_config({**MINICPM3_4B, "scale_depth": None, "dim_model_base": None}).spec
    assert {layer.residual_multiplier for layer in none.layers} == {1.0}
    assert none.logits_multiplier == 1.0


def test_a_rotation_scaled_by_nothing_scales_no_scores() -> None:
    """Youtu-LLM was also published with a scaling that does nothing."""
    rope = {"type": "yarn", "factor": 1.0, "mscale_all_dim": 0}
    plain = {name: value for name, value in YOUTU_LLM_2B.items() if name != "rope_parameters"}
    for config in (YOUTU_LLM_2B, {**plain, "rope_scaling": rope, "rope_theta": 1600000}):
        mixer = model_config(config).spec.layers[0].mixer
        assert isinstance(mixer, LatentAttentionSpec)
        assert mixer.interleaved
        assert mixer.scale == 192**-0.5


@torch.no_grad()
def test_kimi_linear_loads_under_the_hubs_names_and_under_those_that_transformers_saves(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """They differ in the feed-forward of dense layers."""
    tiny_models.build("kimi_linear").save_pretrained(tmp_path)
    theirs, hub = (set(load_file(folder / "model.safetensors")) for folder in (tmp_path, tiny_model("kimi_linear")))
    assert {f"model.layers.0.block_sparse_moe.{part}_proj.weight" for part in ("gate", "up", "down")} == theirs - hub
    assert {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")} == hub - theirs
    ids_BS = some_ids()
    want = tiny_models.build("kimi_linear")(ids_BS).logits
    for folder in (tmp_path, tiny_model("kimi_linear")):
        torch.testing.assert_close(dense_logits(load(folder), ids_BS), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"q_lora_rank": None, "attention_bias": False}, {"scale_depth": None}])
def test_minicpm3_without_a_query_rank_and_without_multipliers(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_models.save("minicpm3", tmp_path, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "minicpm3"
    ids_BS = some_ids()
    want = tiny_models.build("minicpm3", **changes)(ids_BS).logits
    torch.testing.assert_close(dense_logits(load(tmp_path), ids_BS), want, rtol=1e-4, atol=1e-4)


WIDE: dict[str, int] = {  # whole groups and blocks of the quantized
    "hidden_size": 128,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


@pytest.mark.few(4)
@torch.no_grad()
@pytest.mark.parametrize("scheme", ["fp8 blocks", "gptq", "awq"])
@pytest.mark.parametrize("family", LATENT_LLAMAS)
def test_quantized_checkpoints_score_as_their_numbers(family: str, scheme: str, tmp_path: Path) -> None:
    """Kimi Linear's six fused projections lie in six tensors, and its convolutions and rates stay plain."""
    changes: dict[str, Any] = {"q_lora_rank": 128, "attention_bias": False}
    if family == "kimi_linear":
        delta = {**tiny_models.CONFIGS[family][1]["linear_attn_config"], "head_dim": 128, "num_heads": 8}
        changes = {"moe_intermediate_size": 128, "linear_attn_config": delta}
    folder, model = quantize(family, SCHEMES[scheme], tmp_path / "model", **WIDE, **changes)
    want = model(some_ids()).logits
    torch.testing.assert_close(dense_logits(load(folder), some_ids()), want, rtol=1e-4, atol=1e-4 * float(want.max()))
