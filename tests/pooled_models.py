"""Tiny random models that embed or classify, saved as model folders with tokenizers, and what transformers makes of
their prompts: the oracle of tests of pooling."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "what",
    "is", "capital", "of", "france", "paris", "berlin", "yes", "no", "and", "then", "again",
]  # fmt: skip
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCAB = 64
POSITIONS = 120
DENSE = 24  # outputs of the dense layer in `sentence_folder`

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
_MODERN: dict[str, Any] = {
    **_COMMON,
    "local_attention": 8,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_ODD: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 67,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_attention_heads": 3,
}
_DISTIL: dict[str, Any] = {
    "vocab_size": 67,
    "dim": 60,
    "hidden_dim": 52,
    "n_heads": 3,
    "n_layers": 3,
    "max_position_embeddings": POSITIONS,
}
_ALBERT: dict[str, Any] = {**_ODD, "embedding_size": 20, "num_hidden_groups": 2, "num_hidden_layers": 5}
_MPNET: dict[str, Any] = {**_ODD, "max_position_embeddings": 2 + POSITIONS, "hidden_act": "gelu_new"}
_JINA: dict[str, Any] = {**_ODD, "type_vocab_size": 1}
_DECODER: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_DEBERTA: dict[str, Any] = {
    **_ODD,
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 16,
    "type_vocab_size": 0,
}
_T5: dict[str, Any] = {
    "vocab_size": 67,
    "d_model": 44,
    "d_kv": 20,
    "d_ff": 52,
    "num_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "n_positions": POSITIONS,
}
_GEMMA: dict[str, Any] = {
    **_ODD,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "query_pre_attn_scalar": 20,
    "sliding_window": 12,
    "sliding_window_pattern": 2,
}
_ROBERTA: dict[str, Any] = {**_COMMON, "type_vocab_size": 1, "max_position_embeddings": POSITIONS + 1}

# Family → what makes the model of transformers
FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**_COMMON)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**_ROBERTA)),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**_DISTIL)),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**_ODD, embedding_size=20)),
    "albert": lambda: transformers.AlbertModel(transformers.AlbertConfig(**_ALBERT)),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**_MPNET)),
    "nomic_bert": lambda: transformers.NomicBertModel(transformers.NomicBertConfig(**_ODD)),
    "jina_v3": lambda: transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(**_JINA)),
    "embedding_gemma": lambda: transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(**_GEMMA, use_bidirectional_attention=True)
    ),
    "t5_encoder": lambda: transformers.T5EncoderModel(transformers.T5Config(**_T5)),
    "umt5_encoder": lambda: transformers.UMT5EncoderModel(
        transformers.UMT5Config(**_T5, feed_forward_proj="gated-gelu")
    ),
    "deberta": lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**_DEBERTA)),
    "modernbert": lambda: transformers.ModernBertModel(transformers.ModernBertConfig(**_MODERN)),
    "qwen3": lambda: transformers.Qwen3Model(transformers.Qwen3Config(**_DECODER)),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**_DECODER)),
    "bert_classifier": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**_COMMON, num_labels=3)
    ),
    "bert_reranker": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**_COMMON, num_labels=1)
    ),
    "roberta_classifier": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**_ROBERTA, num_labels=4, problem_type="multi_label_classification")
    ),
    "xlm_roberta_reranker": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(**_ROBERTA, num_labels=1)
    ),
    "distilbert_classifier": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(**_DISTIL, num_labels=3)
    ),
    "electra_classifier": lambda: transformers.ElectraForSequenceClassification(
        transformers.ElectraConfig(**_ODD, embedding_size=60, num_labels=1)
    ),
    "albert_classifier": lambda: transformers.AlbertForSequenceClassification(
        transformers.AlbertConfig(**_ALBERT, num_labels=2)
    ),
    "mpnet_classifier": lambda: transformers.MPNetForSequenceClassification(
        transformers.MPNetConfig(**_MPNET, num_labels=3)
    ),
    "nomic_bert_classifier": lambda: transformers.NomicBertForSequenceClassification(
        transformers.NomicBertConfig(**_ODD, num_labels=2)
    ),
    "jina_v3_classifier": lambda: transformers.JinaEmbeddingsV3ForSequenceClassification(
        transformers.JinaEmbeddingsV3Config(**_JINA, num_labels=1)
    ),
    "deberta_classifier": lambda: transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(**_DEBERTA, num_labels=3)
    ),
    "modernbert_classifier": lambda: transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(
            **_MODERN, num_labels=2, classifier_pooling="mean", classifier_bias=True, norm_bias=True, mlp_bias=True
        )
    ),
    "gemma3_classifier": lambda: transformers.Gemma3TextForSequenceClassification(
        transformers.Gemma3TextConfig(**_GEMMA, num_labels=3)
    ),
    "gptj_classifier": lambda: transformers.GPTJForSequenceClassification(
        transformers.GPTJConfig(
            vocab_size=67, n_embd=60, n_head=3, n_layer=2, n_positions=POSITIONS, rotary_dim=8, pad_token_id=0
        )
    ),
    "deepseek_classifier": lambda: transformers.DeepseekV2ForSequenceClassification(
        transformers.DeepseekV2Config(
            **_ODD,
            num_key_value_heads=3,
            kv_lora_rank=20,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=12,
            num_experts_per_tok=2,
            first_k_dense_replace=3,
            num_labels=2,
        )
    ),
    "qwen3_classifier": lambda: transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(**_DECODER, num_labels=2)
    ),
    "qwen2_classifier": lambda: transformers.Qwen2ForSequenceClassification(
        transformers.Qwen2Config(**{**_DECODER, "head_dim": 8}, num_labels=3)
    ),
    "llama_classifier": lambda: transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**_DECODER, num_labels=1)
    ),
    "qwen3_reranker": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**_DECODER, tie_word_embeddings=True)
    ),
}
ENCODERS = (
    "bert",
    "roberta",
    "modernbert",
    "distilbert",
    "electra",
    "albert",
    "mpnet",
    "nomic_bert",
    "jina_v3",
    "embedding_gemma",
    "deberta",
    "t5_encoder",
    "umt5_encoder",
)
DECODERS = ("qwen3", "llama")
CLASSIFIERS = tuple(
    name for name in FAMILIES if name.endswith("classifier") or name in ("bert_reranker", "xlm_roberta_reranker")
)


def build(family: str) -> Any:
    """Return the model, with norms and biases random too, so that a forgotten one shows."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3 if parameter.ndim > 1 else 0.2)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def save(family: str, folder: Path) -> Path:
    build(family).save_pretrained(folder)
    tokenizer(family).save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, **special}
    types = ["token_type_ids"] if family.startswith("bert") else []
    settings["model_input_names"] = ["input_ids", *types, "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tokenizer(family: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of whole words. BERT's gives the second text of a pair another type."""
    vocabulary = {word: index for index, word in enumerate([*SPECIALS, *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    pair, specials = "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    if family.startswith(("qwen", "llama")):
        single, pair = "$A [SEP]", "$A $B [SEP]"
    else:
        single = "[CLS] $A [SEP]"
        pair = pair if family.startswith("bert") else "[CLS] $A [SEP] [SEP] $B [SEP]"
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
    return backend


def sentence_folder(
    family: str,
    folder: Path,
    mode: str,
    *,
    dense: bool = False,
    normalize: bool = True,
    longest: int | None = POSITIONS,
    prompts: dict[str, str] | None = None,
    version: int = 5,
    lower: bool = False,
) -> Path:
    """Save a family as this version of sentence-transformers does, with this kind of pooling.

    longest: tokens to which it cuts its inputs; None: none is said beside the tokenizer's.
    lower: texts are made small first.
    """
    width = json.loads((save(family, folder) / "config.json").read_text())
    width = width.get("hidden_size", width.get("dim", width.get("d_model")))
    (folder / "1_Pooling").mkdir()
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling: dict[str, Any]
    if version < 6:
        pooling = {"word_embedding_dimension": width} | {
            f"pooling_mode_{kind}": kind.startswith(mode) for kind in kinds
        }
    else:
        pooling = {"embedding_dimension": width, "pooling_mode": mode.removesuffix("_token").removesuffix("_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": True}))
    names = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if dense:
        names.append(("2_Dense", "Dense"))
        (folder / "2_Dense").mkdir()
        settings = {"in_features": width, "out_features": DENSE, "bias": True}
        settings["activation_function"] = "torch.nn.modules.activation.Tanh"
        (folder / "2_Dense" / "config.json").write_text(json.dumps(settings))
        torch.manual_seed(1)
        tensors = {"linear.weight": torch.randn(DENSE, width), "linear.bias": torch.randn(DENSE)}
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    if normalize:
        names.append((f"{len(names)}_Normalize", "Normalize"))
        (folder / names[-1][0]).mkdir()
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{_room(kind, version)}.{kind}"}
        for index, (path, kind) in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    _save_settings(folder, version, longest, lower)
    settings = {"prompts": prompts or {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def _room(kind: str, version: int) -> str:
    """Return the package of a kind of module."""
    if version < 6:
        return "models"
    return f"sentence_transformer.modules.{kind.lower()}" if kind == "Pooling" else f"base.modules.{kind.lower()}"


def _save_settings(folder: Path, version: int, longest: int | None, lower: bool) -> None:
    """Write what each version keeps of its first module. From 6 on (in fact from 5.4) the limit is the tokenizer's."""
    if version < 6:
        settings: dict[str, Any] = {"max_seq_length": longest, "do_lower_case": lower}
    else:
        text = {"method": "forward", "method_output_name": "last_hidden_state"}
        settings = {"transformer_task": "feature-extraction", "modality_config": {"text": text}}
        settings |= {"module_output_name": "token_embeddings", **({"do_lower_case": True} if lower else {})}
        if longest is not None:
            file = folder / "tokenizer_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": longest}))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


@torch.inference_mode()
def hidden(model: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
    """Return the last hidden states of one prompt by itself: [T, M]."""
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    return model(torch.tensor([list(ids)]), **more).last_hidden_state[0]


@torch.inference_mode()
def logits(model: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
    """Return the labels' scores of one prompt by itself."""
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    return model(torch.tensor([list(ids)]), **more).logits[0]
