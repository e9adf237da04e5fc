"""Settings of an engine's steps: their size, and the way in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import AtLeast, Named, Settings
from ridgeline.core.settings.policies import AGING, MOST_SECONDS, PolicySettings, weights_of
from ridgeline.core.settings.speculation import Speculation, speculation_of

MOST_MS = 1e3 * MOST_SECONDS
# Requests at once and tokens per step, unless the user says otherwise.
DEFAULT_LIMITS = {"cuda": (256, 8192), "cpu": (32, 512)}
LARGE_GPU = 70 << 30  # a GPU with so many bytes takes LARGE_STEP tokens per step: their products run a little faster
LARGE_STEP = 16_384
MAX_LOGPROBS = 20  # likeliest tokens that a request may have reported for each token, unless an operator says more


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """The size of a step, and the way in which it runs.

    max_model_len: the longest prompt and output together, in tokens. It may be text, in which 8k is 8000, 8K is 8192
        and auto is None. So may max_num_batched_tokens and kv_cache_memory.
    max_logprobs: the most likeliest tokens that a request may have reported for each token. -1: the whole vocabulary.
    enable_prompt_embeds: prompts may come as vectors in the place of tokens' embeddings.
    enable_mm_embeds: pictures and sounds may come as the vectors that a tower or a listener makes of them.
    max_num_seqs: how many requests run at once.
    max_num_batched_tokens: the most tokens that one step runs.
    enable_chunked_prefill: a step may run a part of a prompt. Without, each prompt runs in one step, which must have
        room for the longest, and others wait until it has run.
    long_prefill_token_threshold: the most tokens of one prompt that a step runs, so that several prompts share it;
        0: as many as fit.
    max_num_partial_prefills: how many prompts may be under way at a time of which a step runs a part. From 2 on a step
        divides its tokens among so many. 0: as many as fit.
    max_long_partial_prefills: how many of these may be long: above long_prefill_token_threshold, or else 4 % of the
        context. Shorter ones then overtake those that wait (engine/waiting.py). 0: all of them.
    enforce_eager: launch ops one by one instead of replaying CUDA graphs; this is slower and starts sooner.
    deterministic: a request gets the same bits whatever runs beside it (slower; on a CPU not all models).
    capture_at_start: capture all CUDA graphs before the engine is ready. By default those of the first requests' sizes
        are, and others behind the first step of their size, or while there is no request.
    capture_at_start: capture all CUDA graphs before the engine is ready. By default each is captured behind the first
        step of its size, or while there is no request.
    deterministic: a request gets the same bits whatever runs beside it (GPU only; slower).
    cascade: decoding requests with the same first cache blocks read their keys together. The default is yes on a GPU,
        but not with deterministic.
    tenant_weights: shares of service where these are not equal, as "a=2,b=1" (policies vtc, drr and dlpm).
    priority_aging: seconds of waiting after which a request rises by one level of priority (policy priority); 0: never.
    slo_ttft_ms, slo_itl_ms: milliseconds until the first token and between tokens that are promised to requests which
        name none (policy slo); 0: nothing is promised between tokens.
    itl_target: the milliseconds that a step with prompts should take at most while requests decode, since these wait
        for it. 0 sets no bound. With None `ridgeline serve` derives it from model and device; offline, where no client
        waits, there is none.
    speculative_config: how drafts of tokens to come are made, which a step verifies together, as in {"method": "ngram",
        "num_speculative_tokens": 4, "prompt_lookup_max": 4}, or {"model": FOLDER, "num_speculative_tokens": 4} for a
        draft model (`core.settings.speculation.Speculation`). Answers are the same as without it.
    kernels: op → implementation, where the platform's first choice is not wanted ("reference" always exists).
    """

    max_model_len: Annotated[int | None, AtLeast(1)] = None
    max_num_seqs: Annotated[int | None, AtLeast(1)] = None
    max_num_batched_tokens: Annotated[int | None, AtLeast(1)] = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, AtLeast(0)] = 0
    max_num_partial_prefills: Annotated[int, AtLeast(0)] = 0
    max_long_partial_prefills: Annotated[int, AtLeast(0)] = 0
    max_logprobs: int = MAX_LOGPROBS
    enable_prompt_embeds: bool = False
    enable_mm_embeds: bool = False
    scheduling_policy: str = "fcfs"
    tenant_weights: str = ""
    priority_aging: Annotated[float, Named("a number of seconds from 0")] = AGING
    slo_ttft_ms: Annotated[float, Named("a number of milliseconds above 0")] = 2000.0
    slo_itl_ms: Annotated[float, Named("a number of milliseconds from 0")] = 0.0
    itl_target: Annotated[float | None, Named("a number of milliseconds from 0")] = None
    seed: int = 0
    enforce_eager: bool = False
    capture_at_start: bool = False
    deterministic: bool = False
    cascade: bool | None = None
    speculative_config: Mapping[str, object] | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    debug_checks: bool = False

    def check(self) -> None:
        speculation_of(self.speculative_config)
        weights_of(self.tenant_weights)
        for name, most in ("priority_aging", inf), ("slo_ttft_ms", MOST_MS), ("slo_itl_ms", MOST_MS):
            if not 0 <= getattr(self, name) <= most or (name == "slo_ttft_ms" and not self.slo_ttft_ms):
                raise InvalidConfig(f"{name} must not be negative, nor above an hour, got {getattr(self, name)!r}.")
        if self.max_long_partial_prefills > self.max_num_partial_prefills > 0:
            raise InvalidConfig(
                f"max_long_partial_prefills is {self.max_long_partial_prefills}, above max_num_partial_prefills "
                f"{self.max_num_partial_prefills}; lower it."
            )
        if self.itl_target is not None and not 0 <= self.itl_target < float("inf"):
            raise InvalidConfig(f"itl_target must be a number of milliseconds from 0, got {self.itl_target!r}.")
        parts = "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills", "itl_target"
        if not self.enable_chunked_prefill and (given := [name for name in parts if getattr(self, name)]):
            raise InvalidConfig(
                f"{given[0]} divides prompts, which run whole without enable_chunked_prefill; leave it out."
            )
        if self.max_logprobs < -1:
            raise InvalidConfig(f"max_logprobs must be at least 0, or -1 for all, got {self.max_logprobs!r}.")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise InvalidConfig(f"seed must fit into 64 bits, got {self.seed!r}.")

    @property
    def policy(self) -> PolicySettings:
        """The settings of the scheduling policy."""
        return PolicySettings(
            tenant_weights=weights_of(self.tenant_weights),
            priority_aging=self.priority_aging,
            slo_ttft=self.slo_ttft_ms / 1e3,
            slo_itl=self.slo_itl_ms / 1e3,
        )

    @property
    def speculation(self) -> Speculation | None:
        """The way in which drafts are made, or None if there are none."""
        return speculation_of(self.speculative_config)

    @property
    def num_drafts(self) -> int:
        """The drafts of a request's next tokens that a step verifies at most."""
        return 0 if self.speculation is None else self.speculation.num_drafts

    @property
    def draft_depth(self) -> int | None:
        """The most of these drafts that can be right, if they form a tree."""
        tree = None if self.speculation is None else self.speculation.tree
        return None if tree is None else tree.depth

    @property
    def drafted_ahead(self) -> int:
        """The positions behind a step's tokens at which a draft model or a head writes keys of its drafts."""
        return 0 if self.speculation is None else self.speculation.drafted_ahead


def check_limits(max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int) -> None:
    """Raise InvalidConfig if a step has no room for a token of every running request and its drafts."""
    if num_drafts and max_num_batched_tokens < max_num_seqs * (1 + num_drafts):
        raise InvalidConfig(
            f"{max_num_seqs} sequences of {1 + num_drafts} tokens each, with their drafts, make steps of more than "
            f"max_num_batched_tokens ({max_num_batched_tokens}); lower max_num_seqs or raise that."
        )
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens is {max_num_batched_tokens}, below max_num_seqs {max_num_seqs}; "
            "every running request needs room for one token per step."
        )
