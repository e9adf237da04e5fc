"""The count of right drafts, on text that the target writes behind held-out prompts.

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

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.training.learners import Learner, right
from ridgeline.training.target import continued
from ridgeline.training.tokenizer import SEPARATOR_ID, encode_documents
from ridgeline.training.traces import save_whole

BATCH = 16  # sequences whose scores exist at once


@dataclass(frozen=True)
class Acceptance:
    """The fate of drafts. steps: those that verified `drafts` drafts each. tokens: what these steps brought.
    accepted: the share of steps that accepted the first draft, the first two, and so on."""

    drafts: int
    steps: int
    tokens: int
    accepted: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def as_report(self) -> dict[str, Any]:
        """Return the content of report.json."""
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


def written(target: Decoder, prompts_BS: Tensor, count: int, folder: Path, of: str) -> Tensor:
    """Return the prompts as the target continues them with its likeliest tokens, from `folder` if they were continued
    there before: [B, S]. of: tells the target from others."""
    digest = hashlib.sha256(f"{count} {of}".encode() + prompts_BS.cpu().numpy().tobytes()).hexdigest()[:16]
    file = folder / f"written-{digest}.safetensors"
    if not file.exists():
        parts = [continued(target, part_BS, count) for part_BS in prompts_BS.split(4 * BATCH)]
        save_whole({"tokens": torch.cat(parts)}, file)
    return load_file(file)["tokens"].to(prompts_BS.device)


def acceptances(
    learner: Learner, target: Decoder, text_BS: Tensor, prompt: int, drafts: Sequence[int]
) -> list[Acceptance]:
    """Walk through the continuations of prompts of `prompt` tokens, once for each number of drafts a step."""
    most = max(drafts)
    ends = [_end(tokens_S, prompt) for tokens_S in text_BS.tolist()]
    found = []
    for count in drafts:  # a block of more masks guesses other tokens
        right_BPK = torch.cat([right(learner, target, part_BS, count) for part_BS in text_BS.split(BATCH)])
        runs_BP = right_BPK.int().cumprod(-1).sum(-1).tolist()
        walks = (walk(runs_P, end, prompt, most) for runs_P, end in zip(runs_BP, ends, strict=True))
        accepted = np.array([run for runs in walks for run in runs], dtype=np.int64)
        shares = tuple(float((accepted > index).mean()) if len(accepted) else 0.0 for index in range(count))
        found.append(Acceptance(count, len(accepted), int(accepted.sum()) + len(accepted), shares))
    return found


def walk(runs_P: Sequence[int], end: int, prompt: int, most: int) -> list[int]:
    """Return the number of drafts that each step accepts. runs_P: how many in a row are right behind position i, where
    token i + 1 is the last that is known. end: the tokens of the text. A step is not counted if `most` drafts would
    reach behind it."""
    found = []
    known = prompt  # the first token behind the prompt came without a draft
    while known + most + 1 < end:
        found.append(runs_P[known - 1])
        known += found[-1] + 1
    return found


def _end(tokens_S: Sequence[int], prompt: int) -> int:
    """Return the number of tokens up to the end of the text behind the prompt."""
    return tokens_S.index(SEPARATOR_ID, prompt) if SEPARATOR_ID in tokens_S[prompt:] else len(tokens_S)
