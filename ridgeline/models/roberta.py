"""RoBERTa and XLM-RoBERTa: BERT whose positions begin behind the padding token's id."""

from __future__ import annotations

from ridgeline.models.bert import DEFAULTS, Bert
from ridgeline.models.config import Config

ROBERTA_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50265,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}


class Roberta(Bert):
    name = "RobertaModel"
    base = "roberta"
    defaults = ROBERTA_DEFAULTS

    @staticmethod
    def offset(config: Config) -> int:
        return config.integer("pad_token_id", at_least=0) + 1


class RobertaClassifier(Roberta):
    name = "RobertaForSequenceClassification"
    head = ("classifier.dense", "classifier.out_proj")
