"""How many drafts are right, on text that the target writes behind held-out prompts.

Prompts of equal length are cut out of held-out files, and the target continues each with its likeliest tokens. Then
verification is walked through: a step has k drafts behind the last token, accepts those in front of the first wrong one
and adds the target's own token. A request ends where its text does.

Legend:
    B  prompts
    S  tokens of a prompt, or of a prompt and its continuation
    P  positions
    K  drafts of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.training.learners import Learner, right
from ridgeline.training.target import continued
from ridgeline.training.tokenizer import SEPARATOR_ID, encode_documents

BATCH = 16  # sequences whose scores exist at once


@dataclass(frozen=True)
class Acceptance:
    """What became of drafts. steps: those that verified `drafts` drafts each. tokens: what these steps brought.
    accepted: the share of steps that accepted the first draft, the first two, and so on."""

    drafts: int
    steps: int
    tokens: int
    accepted: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    def as_report(self) -> dict[str, Any]:
        """Return what report.json holds."""
        return asdict(self) | {"tokens_per_step": self.tokens_per_step}


def prompts(tokenizer: Tokenizer, texts: Sequence[str], *, count: int, length: int, seed: int) -> Tensor:
    """Return beginnings and middles of texts, drawn at random, behind a separator: int64 [B, S]. Raise InvalidConfig if
    all texts are shorter."""
    documents = [ids for ids in encode_documents(tokenizer, texts) if len(ids) >= length]
    if not documents:
        raise InvalidConfig(f"no held-out file has {length} tokens; hold out more text.")
    generator = np.random.default_rng(seed)
    sizes = np.array([len(ids) for ids in documents])
    rows = []
    for index in generator.choice(len(documents), count, p=sizes / sizes.sum()):
        ids = documents[index]
        start = generator.integers(0, len(ids) - length + 2)
        rows.append(np.concatenate(([SEPARATOR_ID], ids[start : start + length - 1])))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def written(target: Decoder, prompts_BS: Tensor, count: int) -> Tensor:
    """Return the prompts as the target continues them with its likeliest tokens: [B, S]."""
    return torch.cat([continued(target, part_BS, count) for part_BS in prompts_BS.split(4 * BATCH)])


def acceptance(learner: Learner, target: Decoder, text_BS: Tensor, prompt: int, drafts: int) -> Acceptance:
    """Walk through the continuations of prompts of `prompt` tokens, with this many drafts a step."""
    right_BPK = torch.cat([right(learner, target, part_BS, drafts) for part_BS in text_BS.split(BATCH)])
    runs_BP = right_BPK.int().cumprod(-1).sum(-1)
    walks = [walk(runs_P, _end(tokens_S, prompt), prompt, drafts) for runs_P, tokens_S in zip(
        runs_BP.tolist(), text_BS.tolist(), strict=True
    )]  # fmt: skip
    found = np.array([run for runs in walks for run in runs], dtype=np.int64)
    shares = tuple(float((found > index).mean()) if len(found) else 0.0 for index in range(drafts))
    return Acceptance(drafts, len(found), int(found.sum()) + len(found), shares)


def walk(runs_P: Sequence[int], end: int, prompt: int, drafts: int) -> list[int]:
    """Return the number of drafts that each step accepts. runs_P: how many in a row are right behind position i, where
    token i + 1 is the last that is known. end: the tokens of the text. A step whose drafts would reach behind it is
    not counted."""
    found = []
    known = prompt  # the first token behind the prompt came without a draft
    while known + drafts + 1 < end:
        found.append(runs_P[known - 1])
        known += found[-1] + 1
    return found


def _end(tokens_S: Sequence[int], prompt: int) -> int:
    """Return the number of tokens up to the end of the text behind the prompt."""
    return tokens_S.index(SEPARATOR_ID, prompt) if SEPARATOR_ID in tokens_S[prompt:] else len(tokens_S)
