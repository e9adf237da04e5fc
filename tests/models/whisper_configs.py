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
