"""Configs of published models whose decoder attends to an encoder, as far as they decide shapes."""

from __future__ import annotations

from typing import Any

FLAN_T5_BASE: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 768,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}
SENTENCE_T5 = FLAN_T5_BASE | {"architectures": ["T5EncoderModel"], "feed_forward_proj": "relu"}
UMT5_SMALL = FLAN_T5_BASE | {
    "architectures": ["UMT5ForConditionalGeneration"],
    "model_type": "umt5",
    "d_ff": 1024,
    "d_model": 512,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "vocab_size": 256384,
}
UMT5_ENCODER = UMT5_SMALL | {"architectures": ["UMT5EncoderModel"]}
BART_LARGE: dict[str, Any] = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "activation_function": "gelu",
    "d_model": 1024,
    "decoder_start_token_id": 2,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "forced_bos_token_id": 0,
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "vocab_size": 50265,
}
MBART_LARGE_50 = BART_LARGE | {
    "architectures": ["MBartForConditionalGeneration"],
    "model_type": "mbart",
    "activation_function": "relu",
    "forced_bos_token_id": None,
    "scale_embedding": True,
    "vocab_size": 250054,
}
PEGASUS_XSUM = BART_LARGE | {
    "architectures": ["PegasusForConditionalGeneration"],
    "model_type": "pegasus",
    "activation_function": "relu",
    "encoder_layers": 16,
    "decoder_layers": 16,
    "decoder_start_token_id": 0,
    "forced_bos_token_id": None,
    "max_position_embeddings": 512,
    "scale_embedding": True,
    "vocab_size": 96103,
}
OPUS_MT_EN_DE = BART_LARGE | {
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "activation_function": "swish",
    "bad_words_ids": [[58100]],
    "d_model": 512,
    "decoder_start_token_id": 58100,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "forced_bos_token_id": None,
    "max_position_embeddings": 512,
    "scale_embedding": True,
    "vocab_size": 58101,
}
NLLB_200_DISTILLED_600M = BART_LARGE | {
    "architectures": ["M2M100ForConditionalGeneration"],
    "model_type": "m2m_100",
    "activation_function": "relu",
    "forced_bos_token_id": None,
    "scale_embedding": True,
    "vocab_size": 256206,
}
EVERY = (
    FLAN_T5_BASE,
    SENTENCE_T5,
    UMT5_SMALL,
    UMT5_ENCODER,
    BART_LARGE,
    MBART_LARGE_50,
    PEGASUS_XSUM,
    OPUS_MT_EN_DE,
    NLLB_200_DISTILLED_600M,
)
