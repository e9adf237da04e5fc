"""The decoder computes what transformers computes, for every family, at every position.

float32 logits have a standard deviation of about 1.6 here and pass some twenty roundings per layer of 2**-24 each;
1e-4 leaves room for another order of summation and none for another formula. Half precisions are held to the error
transformers itself makes in that dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.core.specs.model import WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.layers.norm import Norm
from ridgeline.weights.convert.convert import convert
from ridgeline.weights.loader import export_checkpoint, load_weights, read_model_config
from tests import tiny_models
from tests.weights.loading import OPS, REFERENCE_OPS, dense_logits, load

TinyModel = Callable[[str], Path]

BATCH, LENGTH = 2, 48  # several windows long

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("mistral", {"sliding_window": None, "head_dim": 24}),
    ("mistral", {"sliding_window": 1}),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 96}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}),
    ("gpt2", {"scale_attn_weights": False}),
    ("neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"use_sliding_window": False}),
    ("smollm3", {"use_sliding_window": False, "no_rope_layers": None}),
    ("phi3", {"sliding_window": 5, "tie_word_embeddings": True}),
    ("olmo2", {"attention_bias": True}),
    ("bloom", {"n_head": 4, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("gemma3", {"attn_logit_softcapping": 5.0}),
    ("gemma4", {"attention_bias": True, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention", "sliding_attention"]}),
    ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True}),
    ("qwen3_moe", {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5}),
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 5}),
    ("mixtral", {"sliding_window": None, "head_dim": 24, "num_local_experts": 3, "num_experts_per_tok": 1}),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": None, "decoder_sparse_step": 3}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("deepseek", {"norm_topk_prob": True, "n_shared_experts": None, "num_key_value_heads": 2}),
    ("deepseek", {"norm_topk_prob": True, "num_experts_per_tok": 1, "attention_bias": True}),
    ("deepseek", {"num_hidden_layers": 3, "first_k_dense_replace": 0, "moe_layer_freq": 2}),
    ("deepseek", {"n_routed_experts": None}),
    ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    ("olmoe", {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}),  # which this family does not have
    ("granite_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    ("granite_moe_shared", {"shared_intermediate_size": 0}),
    ("glm4_moe", {"norm_topk_prob": False, "use_qk_norm": False, "attention_bias": False, "n_shared_experts": 1}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_experts_per_tok": 8}),
    ("minimax_m2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_local_experts": 3}),
    *((family, {"num_local_experts": 1, "num_experts_per_tok": 1}) for family in ("mixtral", "granite_moe", "gpt_oss")),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False, "layer_types": None}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": None, "full_attn_idxs": [0]}),
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "conv_L_cache": 2, "num_dense_layers": 0}),
    ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": 6, "expert_layer_offset": 0}),
    ("jamba", {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 0, "mamba_d_conv": 2}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_bias": True, "projectors_bias": True}),
    (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_n_heads": 8,
            "mamba_n_groups": 4,
            "mamba_d_ssm": None,
            "mamba_conv_bias": False,
        },
    ),
    ("falcon_h1", {"time_step_limit": (0.4, float("inf")), "head_dim": 24, "tie_word_embeddings": True}),
    ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_key_value_heads": 2}),
    ("zamba2", {"add_bias_linear": True, "num_mem_blocks": 3, "hidden_act": "silu", "mamba_ngroups": 1}),
    ("zamba2", {"num_mem_blocks": 1, "intermediate_size": None, "mamba_expand": 3}),
    ("qwen3_next", {"attention_bias": True, "norm_topk_prob": False, "linear_num_value_heads": 2}),
    ("qwen3_next", {"num_experts": 0, "layer_types": None, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    ("qwen3_5", {"attention_bias": True, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 1}),
    ("mamba2", {"n_groups": 4}),
    ("bamba", {"mamba_n_groups": 4, "mamba_proj_bias": False}),
    ("granite_hybrid", {"mamba_n_groups": 8}),
    ("gemma4", {"num_hidden_layers": 12, "layer_types": None}),  # transformers then writes layer 5 as "05"
]

# docs/formats.md lists these. Equal with the context of pretraining as the longest; otherwise they differ where a
# sequence is no longer than it.
BY_LENGTH: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {"original_max_position_embeddings": 64}),
    (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
]


def some_ids(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(tiny_models.VOCAB, (BATCH, LENGTH), generator=generator)


@torch.no_grad()
def oracle_logits(family: str, ids_BS: Tensor, **changes: Any) -> Tensor:
    return tiny_models.build(family, **changes)(ids_BS).logits


@pytest.mark.parametrize(("family", "changes"), BY_LENGTH)
@torch.no_grad()
def test_rotations_that_depend_on_the_length_follow_the_longest_context(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    ids_BS, folder = some_ids(), tiny_models.save(family, tmp_path, **changes)
    want, config = oracle_logits(family, ids_BS, **changes), read_model_config(folder)
    for longest, is_equal in ((64, True), (None, False)):
        decoder = Decoder(
            config.spec, OPS, dtype=torch.float32, device=torch.device("cpu"), max_positions=longest, rotary_rows=64
        )
        load_weights(decoder, folder, config.weights)
        assert torch.allclose(dense_logits(decoder, ids_BS), want, rtol=0, atol=1e-4) is is_equal


@torch.no_grad()
def test_a_llama_that_asks_for_it_rotates_a_part_of_each_head(tmp_path: Path) -> None:
    """docs/formats.md lists it; transformers' Llama passes over the entry."""
    ids_BS, changes = some_ids(), {"partial_rotary_factor": 0.5}
    ours = dense_logits(load(tiny_models.save("llama", tmp_path, **changes)), ids_BS)
    passed_over = oracle_logits("llama", ids_BS, **changes)
    torch.testing.assert_close(passed_over, oracle_logits("llama", ids_BS), rtol=0, atol=0)
    assert not torch.allclose(ours, passed_over, rtol=0, atol=1e-2)


@pytest.mark.few(70)
@pytest.mark.parametrize("ops", [OPS, REFERENCE_OPS], ids=["torch", "reference"])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(family: str, ops: Any, tiny_model: TinyModel) -> None:
    ids_BS = some_ids()
    ours = dense_logits(load(tiny_model(family), ops=ops), ids_BS)
    torch.testing.assert_close(ours, oracle_logits(family, ids_BS), rtol=0, atol=1e-4)


@pytest.mark.few(40)
@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
@torch.no_grad()
def test_config_variants_equal_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ids_BS = some_ids()
    ours = dense_logits(load(tiny_models.save(family, tmp_path, **changes)), ids_BS)
    torch.testing.assert_close(ours, oracle_logits(family, ids_BS, **changes), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_multimodal_gemma4_is_run_as_its_text_model(tmp_path: Path) -> None:
    """Other names, a config of its own without the tower's, and a tower whose tensors are passed over; ids of images
    are not asked for."""
    text = transformers.Gemma4TextConfig(**{**tiny_models.CONFIGS["gemma4_moe"][1], "pad_token_id": 0})
    tower = transformers.Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, patch_size=4, position_embedding_size=64, use_clipped_linears=True,
    )  # fmt: skip
    others = dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), tiny_models.VOCAB - 1)
    config = transformers.Gemma4Config(text_config=text, vision_config=tower, audio_config=None, **others)
    oracle = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in oracle.named_parameters():
        parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    oracle.save_pretrained(tmp_path)
    written = tmp_path / "config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "vision_config": None}))
    ids_BS = some_ids() % 100
    torch.testing.assert_close(dense_logits(load(tmp_path), ids_BS), oracle(ids_BS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_a_qwen3_5_that_sees_images_is_run_as_its_text_model(family: str, tmp_path: Path) -> None:
    """Other names, a config of its own, a tower and a drafting layer whose tensors are passed over, and positions with
    three equal numbers. All experts of a layer may lie in one tensor."""
    kind, values = tiny_models.CONFIGS[family]
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**values, "rope_parameters": {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        vision_config={**tower, "num_position_embeddings": 4, "patch_size": 2},
        image_token_id=tiny_models.VOCAB - 1,
        video_token_id=tiny_models.VOCAB - 2,
    )
    oracle = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    plain = tiny_models.build(family)
    oracle.model.language_model.load_state_dict(plain.model.state_dict())
    oracle.lm_head.load_state_dict(plain.lm_head.state_dict())
    oracle.eval().save_pretrained(tmp_path)
    ids_BS = some_ids() % 100
    want = oracle(ids_BS).logits
    torch.testing.assert_close(want, plain(ids_BS).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(dense_logits(load(tmp_path), ids_BS), want, rtol=0, atol=1e-4)
    own = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    assert any("mlp.experts.gate_up_proj" in name for name in own) is (family == "qwen3_5_moe")
    save_file({**own, "mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(dense_logits(load(tmp_path), ids_BS), want, rtol=0, atol=1e-4)
    nothing = {"dtype": None, "shard_size": 1 << 30, "write_texts": lambda source, target: None}
    convert(tmp_path, tmp_path / "converted", **nothing, progress=lambda what, share: None)
    torch.testing.assert_close(dense_logits(load(tmp_path / "converted"), ids_BS), want, rtol=0, atol=1e-4)


@pytest.mark.few(25)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)], ids=str
)  # float16 has the more digits
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@torch.no_grad()
def test_half_precision_is_no_worse_than_transformers(family: str, dtype: torch.dtype, tiny_model: TinyModel) -> None:
    """Error: that of the median position, root mean square against float32 arithmetic on the same, rounded, weights. Of
    all positions it would tell who was luckier where two experts score alike."""
    ids_BS = some_ids()
    theirs = tiny_models.build(family).to(dtype)
    exact = tiny_models.build(family).to(dtype).float()(ids_BS).logits
    ours = dense_logits(load(tiny_model(family), dtype), ids_BS)
    assert ours.dtype == dtype

    def error(logits: Tensor) -> float:
        return (logits.float() - exact).square().mean(-1).sqrt().median().item()

    assert error(ours) < 1.2 * error(theirs(ids_BS).logits)


@pytest.mark.few(25)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@torch.no_grad()
def test_greedy_continuations_are_varied_and_equal(family: str, tiny_model: TinyModel) -> None:
    """Guards the fixtures too: a model that repeats one token would prove little. All tokens but the last are given at
    once: the first token in which a continuation of ours differed would differ here too."""
    prompt = some_ids()[:1, :8]
    theirs = tiny_models.greedy(family, prompt[0].tolist(), 24)
    ours = dense_logits(load(tiny_model(family)), torch.cat((prompt, torch.tensor([theirs[:-1]])), dim=1)).argmax(-1)
    assert ours[0, 7:].tolist() == theirs
    assert len(set(theirs)) >= 8


@pytest.mark.parametrize("family", tiny_models.ATTENDING)
def test_gradients_equal_transformers(family: str, tiny_model: TinyModel) -> None:
    """For the trainer: every parameter gets transformers' gradient, through the fused weights. A correction of scores,
    which is a buffer there, gets none, nor does an indexer. The gated delta rule has no gradients."""
    ids_BS = some_ids()
    decoder, oracle = load(tiny_model(family)), tiny_models.build(family)
    targets = ids_BS[:, 1:].flatten()
    for logits in (dense_logits(decoder, ids_BS), oracle(ids_BS).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()
    unlearned = {name: torch.zeros_like(tensor) for name, tensor in tiny_models.tensors(oracle).items()}
    gradients = {name: each.grad for name, each in oracle.named_parameters() if each.grad is not None}
    wanted = tiny_models.as_stored(oracle, unlearned | gradients)
    got = export_gradients(decoder, read_model_config(tiny_model(family)).weights)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4 * scale)


def export_gradients(decoder: Decoder, weights: WeightMap) -> dict[str, Tensor]:
    """Gradients under the checkpoint's names and shapes."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            assert (parameter.grad is not None) is parameter.requires_grad, name
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for module in decoder.modules():
            if isinstance(module, Norm):
                module.weight += module.offset  # which exporting takes off
    return export_checkpoint(decoder, weights)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3"])
@torch.no_grad()
def test_the_old_rope_spelling_gives_the_same_logits(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` (with "type"), as before transformers 5."""
    folder = tiny_model(family)
    config = json.loads((folder / "config.json").read_text())
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    ids_BS = some_ids()
    assert torch.equal(dense_logits(load(tmp_path), ids_BS), dense_logits(load(folder), ids_BS))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other(family: str, tiny_model: TinyModel) -> None:
    decoder, ids_BS = load(tiny_model(family)), some_ids()
    together = dense_logits(decoder, ids_BS)
    alone = torch.cat([dense_logits(decoder, ids_BS[row : row + 1]) for row in range(BATCH)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_max_positions_bounds_the_rotary_table(tiny_model: TinyModel) -> None:
    decoder = load(tiny_model("llama"))
    short = type(decoder)(decoder.spec, OPS, dtype=torch.float32, device=torch.device("cpu"), max_positions=10)
    short.load_state_dict(decoder.state_dict())
    ids_T, state = some_ids()[0, :10], DenseCausal(1)
    ours, theirs = (each.logits(each(ids_T, torch.arange(10), state)) for each in (short, decoder))
    assert torch.equal(ours, theirs)
    with pytest.raises(IndexError):
        short(ids_T, torch.arange(1, 11), state)


def test_layers_share_one_rotary_table_and_it_is_no_part_of_the_state(tiny_model: TinyModel) -> None:
    decoder = load(tiny_model("llama"), torch.bfloat16)
    (table,) = decoder.buffers()
    assert table.dtype == torch.float32
    assert not [name for name in decoder.state_dict() if "cos_sin" in name]
