"""DistilBERT: BERT without token types, whose tensors have names of their own."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.models.bert import DEFAULTS, Bert


class DistilBert(Bert):
    name = "DistilBertModel"
    base = "distilbert"
    defaults: ClassVar = {**DEFAULTS, "num_hidden_layers": 6, "type_vocab_size": 0}
    spellings: ClassVar = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    }
    before_labels = "relu"
    layers = "transformer.layer"
    unused = ("vocab_", "pre_classifier.", "classifier.")
    names: ClassVar = {
        "mixer.qkv": "attention.q_lin attention.k_lin attention.v_lin",
        "mixer.out": "attention.out_lin",
        "feed_forward.up": "ffn.lin1",
        "feed_forward.down": "ffn.lin2",
    }
    norms: ClassVar = {"mixer_post_norm": "sa_layer_norm", "feed_forward_post_norm": "output_layer_norm"}


class DistilBertClassifier(DistilBert):
    name = "DistilBertForSequenceClassification"
    head = ("pre_classifier", "classifier")
