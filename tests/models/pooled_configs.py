"""Published models that embed and classify, as their config.json has them, and classifiers on published decoders."""

from __future__ import annotations

from typing import Any

BGE_LARGE: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
MINILM_RERANKER = {
    **BGE_LARGE,
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
}
ROBERTA_LARGE: dict[str, Any] = {
    "architectures": ["RobertaModel"],
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
BGE_RERANKER_M3: dict[str, Any] = {
    **ROBERTA_LARGE,
    "architectures": ["XLMRobertaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
}
MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "sep_token_id": 50282,
    "vocab_size": 50368,
}
MODERN_CLASSIFIER = {
    **MODERNBERT,
    "architectures": ["ModernBertForSequenceClassification"],
    "id2label": {"0": "yes", "1": "no", "2": "maybe"},
}


def classifier(decoder: dict[str, Any]) -> dict[str, Any]:
    """Return a decoder's config with a map to three labels."""
    name = decoder["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    return {**decoder, "architectures": [name], "id2label": {"0": "a", "1": "b", "2": "c"}}
