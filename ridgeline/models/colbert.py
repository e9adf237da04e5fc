"""ColBERT: BERT with a map behind every token's vector, by which texts are compared."""

from __future__ import annotations

from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.models.bert import Bert
from ridgeline.models.config import Config

WIDTH = 128  # of a token's vector, where nothing says otherwise


class ColBert(Bert):
    name = "HF_ColBERT"

    @classmethod
    def pooling(cls, config: Config, width: int, types: int) -> PoolingSpec:
        named = [name for name in ("colbert_dim", "dim", "projection_dim") if name in config]
        outputs = config.integer(named[0]) if named else WIDTH
        head = (HeadSpec(outputs=outputs, biasless=True),)
        return PoolingSpec(kind="cls", task="token_embed", width=outputs, head=head, token_types=types)

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        return super().weights(spec) | {"head.maps.0.dense.weight": (Source(name="linear.weight"),)}
