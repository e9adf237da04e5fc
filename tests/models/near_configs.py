"""What the hub's config.json files of families near Llama's say, shortened to what decides shapes."""

from __future__ import annotations

from typing import Any

from tests.models import vision_configs

Values = dict[str, Any]


def _sized(kind: str, name: str, sizes: tuple[int, ...], **others: Any) -> Values:
    """A config with (width, inner width, layers, heads, heads of keys, vocabulary)."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sized = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return {"architectures": [name], "model_type": kind, "torch_dtype": "bfloat16", **sized, **others}


GEMMA_2B = _sized("gemma", "GemmaForCausalLM", (2048, 16384, 18, 8, 1, 256000), head_dim=256, hidden_act="gelu")
MISTRAL_SMALL_3_1 = vision_configs.MISTRAL_SMALL_3_1
AFM_4_5B = _sized(
    "arcee",
    "ArceeForCausalLM",
    (2560, 18432, 36, 20, 4, 128004),
    head_dim=128,
    hidden_act="relu2",
    max_position_embeddings=65536,
    rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
)
SEED_OSS_36B = _sized(
    "seed_oss",
    "SeedOssForCausalLM",
    (5120, 27648, 64, 80, 8, 155136),
    head_dim=128,
    attention_bias=True,
    attention_out_bias=False,
)
INTERNLM3_8B = _sized(
    "internlm3",
    "InternLM3ForCausalLM",
    (4096, 10240, 48, 32, 2, 128512),
    head_dim=128,
    bias=False,
    qkv_bias=False,
    rope_theta=5e7,
    rope_scaling={"rope_type": "dynamic", "factor": 6.0},
    max_position_embeddings=32768,
)
ERNIE_0_3B = _sized("ernie4_5", "Ernie4_5ForCausalLM", (1024, 3072, 18, 16, 2, 103424), head_dim=128)
ERNIE_21B_A3B = _sized(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    (2560, 12288, 28, 20, 4, 103424),
    moe_num_experts=64,
    moe_k=6,
    moe_num_shared_experts=2,
    moe_intermediate_size=1536,
    moe_layer_start_index=1,
)
COMMAND_R = _sized("cohere", "CohereForCausalLM", (8192, 22528, 40, 64, 64, 256000), rope_theta=8e6, use_qk_norm=False)
COMMAND_R7B = _sized(
    "cohere2",
    "Cohere2ForCausalLM",
    (4096, 14336, 32, 32, 8, 256000),
    logit_scale=0.25,
    rope_theta=50000,
    sliding_window=4096,
    sliding_window_pattern=4,
)
GLM_4_9B = _sized("glm", "GlmForCausalLM", (4096, 13696, 40, 32, 2, 151552), head_dim=128)
GLM_4_9B_0414 = _sized("glm4", "Glm4ForCausalLM", (4096, 13696, 40, 32, 2, 151552), head_dim=128, rms_norm_eps=1e-5)
EXAONE_4_32B = _sized(
    "exaone4",
    "Exaone4ForCausalLM",
    (5120, 27392, 64, 40, 8, 102400),
    head_dim=128,
    sliding_window=4096,
    sliding_window_pattern="LLLG",
    layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
)
K_EXAONE = _sized(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    (6144, 18432, 48, 64, 8, 153600),
    head_dim=128,
    num_experts=128,
    moe_intermediate_size=2048,
    sliding_window=128,
    first_k_dense_replace=1,
)
STARCODER2_3B = _sized(
    "starcoder2", "Starcoder2ForCausalLM", (3072, 12288, 30, 24, 2, 49152), sliding_window=4096, rope_theta=999999.44
)
STABLELM_2_1_6B = _sized(
    "stablelm", "StableLmForCausalLM", (2048, 5632, 24, 32, 32, 100352), use_qkv_bias=True, partial_rotary_factor=0.25
)
PHI_2 = _sized("phi", "PhiForCausalLM", (2560, 10240, 32, 32, 32, 51200), partial_rotary_factor=0.4)
GPT_J_6B: Values = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    **{"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400},
    "tie_word_embeddings": False,
}
OPT_1_3B: Values = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    **{"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    **{"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048},
}
FALCON_7B: Values = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    **{"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024},
    **{"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
}
FALCON_40B: Values = {
    **FALCON_7B,
    **{"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8},
    "new_decoder_architecture": True,
}
MPT_7B: Values = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    **{"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432},
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None},
}
OLMO_1B = _sized("olmo", "OlmoForCausalLM", (2048, 8192, 16, 16, 16, 50304), clip_qkv=None)
OLMO_3_7B = _sized(
    "olmo3",
    "Olmo3ForCausalLM",
    (4096, 11008, 32, 32, 32, 100278),
    max_position_embeddings=65536,
    rope_theta=500000,
    rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    sliding_window=4096,
)
DOTS_LLM1 = _sized(
    "dots1",
    "Dots1ForCausalLM",
    (4096, 10944, 62, 32, 32, 152064),
    n_routed_experts=128,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    sliding_window=None,
)

MINISTRAL_8B = _sized(
    "ministral", "MinistralForCausalLM", (4096, 12288, 36, 32, 8, 131072), head_dim=128, sliding_window=32768
)
_GROWING = {
    **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0},
}
MINISTRAL_3_8B = _sized(
    "ministral3",
    "Ministral3ForCausalLM",
    (4096, 14336, 34, 32, 8, 131072),
    head_dim=128,
    rope_parameters=_GROWING,
    max_position_embeddings=262144,
)
MISTRAL_4 = _sized(
    "mistral4",
    "Mistral4ForCausalLM",
    (4096, 12288, 36, 32, 32, 131072),
    **{"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    rope_parameters={**_GROWING, "original_max_position_embeddings": 8192, "factor": 128.0},
    max_position_embeddings=1048576,
)
HUNYUAN_7B = _sized(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    (4096, 14336, 32, 32, 8, 128167),
    head_dim=128,
    tie_word_embeddings=True,
    rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
)
HUNYUAN_A13B = _sized(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    (4096, 3072, 32, 32, 8, 128167),
    head_dim=128,
    num_experts=64,
    moe_topk=[8] * 32,
    moe_intermediate_size=[3072] * 32,
    num_shared_expert=[1] * 32,
    tie_word_embeddings=True,
    rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
)
NEMOTRON_SUPER: Values = {  # its first layers; the others are like them
    **_sized("nemotron-nas", "DeciLMForCausalLM", (8192, 0, 4, 64, 8, 128256)),
    "intermediate_size": None,
    "num_key_value_heads": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 2.625, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 5.25, "no_op": False}},
        {"attention": {"n_heads_in_group": 16, "no_op": False}, "ffn": {"ffn_mult": 1.0, "no_op": False}},
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": None, "no_op": True}},
    ],
}
KIMI_K2_5: Values = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "torch_dtype": "bfloat16",
    "text_config": {
        **_sized("deepseek_v3", "DeepseekV3ForCausalLM", (7168, 18432, 61, 64, 64, 163840)),
        **{"n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rope_theta": 50000.0},
    },
    "vision_config": {},
}

APERTUS_8B = _sized(
    "apertus",
    "ApertusForCausalLM",
    (4096, 21504, 32, 32, 8, 131072),
    hidden_act="xielu",
    qk_norm=True,
    post_norm=False,
)

GEMMA_4_E2B = _sized(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (1536, 6144, 35, 8, 1, 262144),
    **{"head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 20},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "use_double_wide_mlp": True},
    **{"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "tie_word_embeddings": True},
)
_SCOUT = _sized(
    "llama4_text",
    "Llama4ForCausalLM",
    (5120, 8192, 48, 40, 8, 202048),
    **{"intermediate_size_mlp": 16384, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1},
    **{"attention_chunk_size": 8192, "attn_temperature_tuning": 4, "use_qk_norm": True, "rope_theta": 500000.0},
    **{"max_position_embeddings": 10485760, "interleave_moe_layer_step": 1, "no_rope_layers": []},
    rope_scaling={
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
)
LLAMA_4_SCOUT: Values = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": _SCOUT | {"attn_temperature_tuning": True},
    "vision_config": {"num_hidden_layers": 1},
}
LLAMA_4_MAVERICK = _SCOUT | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
_GEMMA_3N: Values = {
    **_sized("gemma3n_text", "Gemma3nForCausalLM", (2048, 8192, 30, 8, 2, 262400), head_dim=256),
    **{"intermediate_size": [8192] * 30, "activation_sparsity_pattern": [*[0.95] * 10, *[0.0] * 20]},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 10},
    **{"altup_num_inputs": 4, "laurel_rank": 64, "sliding_window": 512},
    **{"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6, "tie_word_embeddings": True},
}
GEMMA_3N_E2B: Values = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "model_type": "gemma3n",
    "torch_dtype": "bfloat16",
    "text_config": {name: value for name, value in _GEMMA_3N.items() if name != "architectures"},
    "vision_config": {},
    "audio_config": {},
}
LONGCAT_FLASH: Values = {  # its first blocks; the others are like them
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    **{"hidden_size": 6144, "num_layers": 2, "num_attention_heads": 64, "ffn_hidden_size": 12288},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 512, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12},
    **{"expert_ffn_hidden_size": 2048, "routed_scaling_factor": 6.0, "vocab_size": 131072, "rope_theta": 1e7},
    **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "max_position_embeddings": 131072},
}
PHI_3_5_MOE = _sized(
    "phimoe",
    "PhiMoEForCausalLM",
    (4096, 6400, 32, 32, 8, 32064),
    **{"attention_bias": True, "lm_head_bias": True, "num_local_experts": 16, "num_experts_per_tok": 2},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 131072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01},
    rope_scaling={
        **{"type": "longrope", "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
        **{"short_factor": [1.0] * 64, "long_factor": [1 + pair * 0.7 for pair in range(64)]},
        "original_max_position_embeddings": 4096,
    },
)
GLM_5 = _sized(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    (6144, 12288, 78, 64, 64, 154880),
    **{"kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "index_topk": 2048, "index_n_heads": 32},
    **{"max_position_embeddings": 202752, "num_nextn_predict_layers": 1, "rope_parameters": {"rope_theta": 1e6}},
)
_POSTNORM = {f"layernorm_{part}_alpha": 3.5565588200778455 for part in ("full_attention", "linear_attention", "mlp")}
MINIMAX_M1 = _sized(
    "minimax_m1",
    "MiniMaxM1ForCausalLM",
    (6144, 9216, 80, 64, 8, 200064),
    **{"attn_type_list": [*[0] * 7, 1] * 10, "head_dim": 128, "rotary_dim": 64, "rope_theta": 1e7, "postnorm": True},
    **{"num_local_experts": 32, "num_experts_per_tok": 2, "shared_intermediate_size": 0, **_POSTNORM},
    max_position_embeddings=10240000,
)
MIMO_V2_FLASH = _sized(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    (4096, 16384, 48, 64, 4, 152576),
    **{"head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 128, "swa_num_key_value_heads": 8},
    **{"layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True},
    **{"hybrid_layer_pattern": [0, *[*[1] * 4, 0], *[*[1] * 5, 0] * 7], "moe_layer_freq": [0, *[1] * 47]},
    **{"sliding_window": 128, "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True},
    **{"add_full_attention_sink_bias": False, "routed_scaling_factor": None, "n_shared_experts": None},
    **{"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "max_position_embeddings": 262144},
)
_STEP: Values = {
    **{"hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45, "num_attention_heads": 64},
    **{"num_attention_groups": 8, "head_dim": 128, "vocab_size": 128896, "max_position_embeddings": 262144},
    **{"moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280},
    **{"moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_router_scaling_factor": 3.0, "sliding_window": 512},
    **{"layer_types": ["full_attention", *["sliding_attention"] * 3] * 12, "num_nextn_predict_layers": 3},
    **{"rope_theta": [5e6, *[1e4] * 3] * 12, "partial_rotary_factors": [0.5, *[1.0] * 3] * 12},
    **{"swiglu_limits": [*[0.0] * 43, 7, 7, *[0.0] * 3], "swiglu_limits_shared": [*[0.0] * 43, 16, 16, *[0.0] * 3]},
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072},
        **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
    },
    "yarn_only_types": ["full_attention"],
    "torch_dtype": "bfloat16",
}
STEP_3_5_FLASH: Values = {**_STEP, "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5"}
STEP_3_7_FLASH: Values = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": {**_STEP, "model_type": "step3p5"},
    "vision_config": {"width": 64, "layers": 1, "heads": 2},
}

NEAR: dict[str, Values] = {
    "gemma4_e2b": GEMMA_4_E2B,
    "llama4": LLAMA_4_MAVERICK | {"attn_temperature_tuning": True},
    "llama4_multimodal": LLAMA_4_SCOUT,
    "gemma3n": _GEMMA_3N,
    "longcat": LONGCAT_FLASH,
    "phimoe": {**PHI_3_5_MOE, "architectures": ["PhimoeForCausalLM"]},
    "glm_moe_dsa": GLM_5,
    "minimax": {**MINIMAX_M1, "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax"}
    | {"layer_types": [*["linear_attention"] * 7, "full_attention"] * 10},
    "mimo_v2": MIMO_V2_FLASH,
    "step3p7": STEP_3_7_FLASH,
    "apertus": APERTUS_8B,
    "gemma": GEMMA_2B,
    "gemma3_multimodal": vision_configs.GEMMA_3_4B,
    "mistral3_multimodal": MISTRAL_SMALL_3_1,
    "arcee": AFM_4_5B,
    "seed_oss": SEED_OSS_36B,
    "ernie": ERNIE_0_3B,
    "ernie_moe": ERNIE_21B_A3B,
    "cohere": COMMAND_R,
    "cohere2": COMMAND_R7B,
    "glm": GLM_4_9B,
    "glm4": GLM_4_9B_0414,
    "exaone4": EXAONE_4_32B,
    "exaone_moe": K_EXAONE,
    "starcoder2": STARCODER2_3B,
    "stablelm": STABLELM_2_1_6B,
    "phi": PHI_2,
    "gptj": GPT_J_6B,
    "opt": OPT_1_3B,
    "falcon": FALCON_7B,
    "falcon_40b": FALCON_40B,
    "mpt": MPT_7B,
    "olmo": OLMO_1B,
    "olmo3": OLMO_3_7B,
    "dots1": DOTS_LLM1,
    "ministral": MINISTRAL_8B,
    "ministral3": MINISTRAL_3_8B,
    "hunyuan": HUNYUAN_7B,
    "hunyuan_moe": HUNYUAN_A13B,
}
