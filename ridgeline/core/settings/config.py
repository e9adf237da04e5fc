"""Configuration: frozen, keyword-only, resolved once and passed down. Command-line flags derive from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import AdapterSettings
from ridgeline.core.settings.cache import CacheSettings
from ridgeline.core.settings.checks import check_fields
from ridgeline.core.settings.experts import ExpertSettings
from ridgeline.core.settings.host_tier import HostTierSettings, SessionBounds
from ridgeline.core.settings.model import DTYPE_ALIASES, ModelSettings
from ridgeline.core.settings.parallel import ParallelSettings
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.core.settings.speculation import LOOKAHEAD
from ridgeline.core.settings.steps import StepSettings, check_limits
from ridgeline.core.settings.together import check_together
from ridgeline.kernels.base.kv_format import kv_format

# Settings that may be text such as 8k
COUNTS = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory")
FACTORS = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
FACTORS |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}

GROUPS = (ModelSettings, StepSettings, CacheSettings, ParallelSettings, ExpertSettings, AdapterSettings)


@dataclass(frozen=True, kw_only=True)
class LLMConfig(ModelSettings, StepSettings, CacheSettings, ParallelSettings, ExpertSettings, AdapterSettings):
    """The settings that a user chooses, each in its group. None means that the model and the machine decide."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, count(given, name))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        names: object = self.offload_params
        object.__setattr__(self, "offload_params", (names,) if isinstance(names, str) else tuple(self.offload_params))
        check_fields(self)
        self.take_redundant()
        for group in GROUPS:
            group.check(self)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that contradict each other."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        unset = {"cascade"} if not self.cascade else set()  # False asks for nothing
        if not kv_format(self.kv_cache_dtype).quantized:
            unset.add("kv_cache_dtype")
        check_together({name: value for name, value in given.items() if name not in unset})
        if self.speculation is not None and self.speculation.method == LOOKAHEAD and self.ranks > 1:
            raise InvalidConfig(
                f"lookahead decoding runs on one device yet; leave {' and '.join(self.divided_by)} out, or take "
                "another method."
            )


def count(text: str, name: str) -> int | None:
    """Return the number that a text holds, in which k, m, g, t are powers of 1000 and K, M, G, T of 1024, or None for
    auto and -1. Raise InvalidConfig. `name` is the setting's."""
    spelled = text.strip()
    if spelled in ("-1", "auto"):
        return None
    number, factor = (spelled[:-1], FACTORS[spelled[-1]]) if spelled[-1:] in FACTORS else (spelled, 1)
    whole, _, part = number.partition(".")
    digits = whole + part
    if not (whole and digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise InvalidConfig(f"{name} must be a whole number, or one as 8k (8000) or 8K (8192), got {text!r}.")
    tokens, rest = divmod(int(digits) * factor, 10 ** len(part))
    if rest or (part and factor % 1000):
        raise InvalidConfig(f"{name} is {text!r}, which is no whole number; fractions go with k, m, g and t.")
    return tokens


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The resolved settings of the control plane.

    policy: the settings of the scheduling policy.
    state_cache_share, state_checkpoint_interval: as in `LLMConfig`.
    lookahead_depth: how many plans may be in flight at once.
    chunked_prefill: a step may run a part of a prompt. Without, `max_num_batched_tokens` is at least `max_model_len`,
        and parts run only where the device ran out of memory, or where blocks beside a window did.
    itl_target: the seconds that a step should take at most while requests decode (engine/itl.py).
    cascade: plans name the rows that share their first blocks.
    pools: the model pools: prompts end with vectors instead of tokens.
    encodes: the most tokens of an encoder input; 0: the model has no encoder.
    kept_bytes: of vectors of pictures and sounds that the worker holds at most, beside those that the newest plan uses.
    vector_bytes: of a picture's vector, and of a sound's; 0, 0: the model sees and hears nothing.
    patch_cost: the tokens that cost as much as one patch of a picture.
    pixel_cost: the tokens that cost as much as one of its pixels on their way to patches.
    most_patches: the patches of the largest picture.
    view_side: the patches along both sides of every view, if the tower has learned positions of that shape; 0: any.
    both_ways: as in `ModelSpec`. most_together: the most tokens of a picture, or a prompt, that always run in one step.
    picture_patches: those that the tower runs for a picture, whatever its size; 0: as many as the picture has.
    crosses: the most places of the keys of a request's pictures, if layers of cross attention see them; 0: none does.
    hears: it reads sounds, and every input has that many tokens.
    num_drafts: how many drafts of a request's next tokens a step verifies at most.
    draft_depth: how many of these can be right at most, if they form a tree, of which rows verify all or nothing. None:
        they form a chain.
    drafted_ahead: at how many positions behind those of a plan the worker may write, because a model drafts there.
    even_drafts: True on a GPU: all rows of a step verify as many drafts, since a graph has one shape
        (`engine/step_drafting.py`). Otherwise each request has a number of its own (`engine/row_drafting.py`).
    lookup: how many tokens prompt lookup compares at least and at most in the texts of requests with token masks; 0, 0:
        nothing is looked up there.
    cuts_chunks: the worker may run a chunk of a prompt in pieces, which end anywhere (`ranks/parts.py`).
    host_tier: the host's memory as a second tier of the cache. None: there is none.
    sessions: the bounds of what is kept for sessions that are expected back. None: nothing is.
    max_loras: how many adapters requests may run with at once. 0: none have any.
    adapted_encoders: adapters may change what makes vectors of pictures and sounds.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    policy: PolicySettings = field(default_factory=PolicySettings)
    state_cache_share: float = 0.5
    state_checkpoint_interval: int | None = None
    lookahead_depth: int = 2
    itl_target: float | None = None
    cascade: bool = False
    pools: bool = False
    encodes: int = 0
    kept_bytes: int = 0
    vector_bytes: tuple[int, int] = (0, 0)
    patch_cost: float = 0.0
    pixel_cost: float = 0.0
    most_patches: int = 0
    view_side: int = 0
    both_ways: Literal["pictures", "prompt"] | None = None
    most_together: int = 0
    picture_patches: int = 0
    crosses: int = 0
    hears: bool = False
    num_drafts: int = 0
    draft_depth: int | None = None
    drafted_ahead: int = 0
    even_drafts: bool = False
    lookup: tuple[int, int] = (0, 0)
    cuts_chunks: bool = False
    host_tier: HostTierSettings | None = None
    sessions: SessionBounds | None = field(default_factory=SessionBounds)
    max_loras: int = 0
    adapted_encoders: bool = False
    debug_checks: bool = False

    def __post_init__(self) -> None:
        check_limits(self.max_num_seqs, self.max_num_batched_tokens, self.num_drafts)
