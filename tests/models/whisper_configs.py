"""The config.json files of Whisper models, as they are published, cut to what says something of the network."""

from __future__ import annotations

from typing import Any


def _size(
    width: int, heads: int, encoder: int, decoder: int | None = None, *, vocab: int = 51865, bands: int = 80
) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "bos_token_id": 50257,
        "d_model": width,
        "decoder_attention_heads": heads,
        "decoder_ffn_dim": 4 * width,
        "decoder_layers": decoder or encoder,
        "decoder_start_token_id": 50257 if vocab == 51864 else 50258,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "encoder_layers": encoder,
        "eos_token_id": 50256 if vocab == 51864 else 50257,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "num_mel_bins": bands,
        "scale_embedding": False,
        "vocab_size": vocab,
    }


EVERY = {
    "openai/whisper-tiny": _size(384, 6, 4),
    "openai/whisper-tiny.en": _size(384, 6, 4, vocab=51864),
    "openai/whisper-base": _size(512, 8, 6),
    "openai/whisper-small": _size(768, 12, 12),
    "openai/whisper-medium.en": _size(1024, 16, 24, vocab=51864),
    "openai/whisper-large-v2": _size(1280, 20, 32),
    "openai/whisper-large-v3": _size(1280, 20, 32, vocab=51866, bands=128),
    "openai/whisper-large-v3-turbo": _size(1280, 20, 32, 4, vocab=51866, bands=128),
    "distil-whisper/distil-large-v3": _size(1280, 20, 32, 2, vocab=51866, bands=128),
}

QWEN2_AUDIO_7B: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_token_index": 151646,
    "audio_config": {
        "activation_function": "gelu",
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "scale_embedding": False,
    },
    "text_config": {
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "use_sliding_window": False,
        "vocab_size": 156032,
    },
    "vocab_size": 156032,
}
_OMNI: dict[str, Any] = {
    "audio_token_index": 151646,
    "image_token_index": 151655,
    "video_token_index": 151656,
    "audio_config": {**QWEN2_AUDIO_7B["audio_config"], "n_window": 100, "output_dim": 3584},
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
    },
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "model_type": "qwen2_5_omni_text",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}
QWEN2_5_OMNI_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "thinker_config": {**_OMNI, "model_type": "qwen2_5_omni_thinker"},
}
_OMNI_3: dict[str, Any] = {
    "audio_token_id": 151675,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "audio_config": {
        **QWEN2_AUDIO_7B["audio_config"],
        "downsample_hidden_size": 480,
        "n_window": 50,
        "n_window_infer": 800,
        "output_dim": 2048,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
    },
    "text_config": {
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "max_position_embeddings": 65536,
        "mlp_only_layers": [],
        "model_type": "qwen3_omni_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}
QWEN3_OMNI_30B: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "thinker_config": {**_OMNI_3, "model_type": "qwen3_omni_moe_thinker"},
}
HEARING = (
    QWEN2_AUDIO_7B,
    QWEN2_5_OMNI_7B,
    {**QWEN2_5_OMNI_7B, "architectures": ["Qwen2_5OmniForConditionalGeneration"]},
    {**_OMNI, "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]},
    QWEN3_OMNI_30B,
    {**_OMNI_3, "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"]},
)
