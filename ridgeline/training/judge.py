"""Rewards by a model: an engine of its own scores each answer behind its prompt, as `ridgeline train reward` reads
them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.pooling import PoolingParams
from ridgeline.training.conversations import ExampleReader
from ridgeline.training.rewards import DrawnAnswer
from ridgeline.training.rollouts import BuildsEngine

AT_ONCE = 64  # answers that the engine scores together
CACHE = 1 << 30  # bytes of its keys and values on a GPU


class RewardJudge:
    """A reward model with an engine. Raise InvalidConfig if the model gives no scores, ModelLoadError if it cannot be
    read.

    build: makes the engine (`ridgeline.LLM`). longest: tokens of a prompt with its answer, at most, and some more for
        a template of the model's own.
    """

    def __init__(
        self, build: BuildsEngine, folder: Path, dtype: torch.dtype, device: torch.device, longest: int
    ) -> None:
        self._reader, self._folder = ExampleReader.of_folder(folder, "all"), folder
        options: dict[str, Any] = {"kv_cache_memory": CACHE} if device.type == "cuda" else {}
        self._llm = build(
            folder, device=str(device), dtype=str(dtype).removeprefix("torch."), max_num_seqs=AT_ONCE, **options
        )
        spec = self._llm.assembly.model.spec
        if spec.pooling is None or not spec.pooling.head:
            self.close()
            raise InvalidConfig(f"{folder} is no model that scores texts; `ridgeline train reward` writes one.")
        self._most = min(spec.max_position_embeddings, self._llm.assembly.memory.max_model_len)
        if self._most < longest:
            self.close()
            raise InvalidConfig(
                f"the reward model {folder} takes {self._most:,} tokens, and prompts with answers have up to "
                f"{longest:,}; lower --max-tokens or --max-prompt-tokens."
            )

    def __call__(self, answers: Sequence[DrawnAnswer]) -> list[float]:
        """Return the score of each answer. Raise InvalidConfig for a model that gives several, or a text that is too
        long with the model's template."""
        texts = [self._reader.answered(each.record, each.text) for each in answers]
        if (longest := max(map(len, texts))) > self._most:
            raise InvalidConfig(
                f"an answer has {longest:,} tokens with its prompt; {self._folder} takes {self._most:,}."
            )
        prompts = [{"prompt_token_ids": list(each)} for each in texts]
        found = self._llm.encode(prompts, PoolingParams(task="classify", use_activation=False), use_tqdm=False)
        scores = [torch.as_tensor(each.outputs.data).flatten() for each in found]
        if len(scores[0]) != 1:
            raise InvalidConfig(f"{self._folder} gives {len(scores[0])} scores, and a reward is one number.")
        return [float(each) for each in scores]

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()
