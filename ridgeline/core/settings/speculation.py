"""Speculative decoding, as a user asks for it: the names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.draft_tree import MOST_NODES, DraftTree, dynamic_tree_of, lookahead_tree_of, static_tree_of

NGRAM, DRAFT_MODEL, EAGLE, EAGLE3, MTP, MEDUSA = "ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa"
DFLASH, DSPARK = "dflash", "dspark"
BLOCKS = (DFLASH, DSPARK)  # they draft all tokens of a block at once
BRANCHING = (EAGLE, EAGLE3, MTP, MEDUSA)  # they draft trees too
HEADS = (*BRANCHING, *BLOCKS)  # they read the hidden states of the model that they draft for
LAYER_SKIP, LOOKAHEAD = "layer_skip", "lookahead"
SUFFIX = "suffix"  # a way to look up
BARE = (NGRAM, LAYER_SKIP, LOOKAHEAD)  # they need no network beside the model
METHODS = (NGRAM, SUFFIX, DRAFT_MODEL, *HEADS, LAYER_SKIP, LOOKAHEAD)
NAMED = (DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, *BLOCKS)  # their network lies in a folder of its own
TREE_KEYS = ("speculative_token_tree", "eagle_topk", "num_draft_tokens")
LOOKAHEAD_SIZES = {"window_size": 7, "ngram_size": 5, "verification_set_size": 7}  # the paper's for a model of 34B
SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
CACHED_TOKENS = 128  # of recent outputs for each request that suffix decoding is to remember
MOST_DRAFTS = 16
MOST_VERIFIED = 512  # tokens of a step whose rows verify drafts on a GPU; larger steps are bound by products anyway
MOST_WAITING = 2048  # tokens of all requests that a network which drafts may not have run over yet
LOOKUP = 5  # tokens that prompt lookup compares, unless the user says otherwise
LONGEST_LOOKUP = 64
MOST_RECENT = 1 << 24  # tokens of recent outputs, which take up to 64 bytes each


def verified_widths(most: int, *, whole: bool) -> tuple[int, ...]:
    """Return the numbers of drafts that all rows of a step verify where steps are even, from the narrowest on: the
    most, a half and a quarter of it, and one. whole: the drafts form a tree, which is verified whole."""
    return (most,) if whole else tuple(sorted({1, most // 4, most // 2, most} - {0}))


class SuffixRule(NamedTuple):
    """The choice of drafts by how often they followed (suffix decoding). factor: how many drafts a match has, times its
    tokens. least: the probability below which drafts end."""

    factor: float
    least: float


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The way in which drafts of tokens to come are made.

    method: "ngram": prompt lookup, with the rule `suffix` for the method of that name. What followed the last tokens
        where they stood before is drafted. "draft_model": a smaller model with the same vocabulary goes on. "eagle",
        "eagle3": a head of a layer goes on from the model's hidden states. "mtp": the layer for multi-token prediction,
        which the checkpoint itself holds, does. "medusa": heads guess one token each. "dflash", "dspark": a head
        guesses a block of tokens in one pass. "layer_skip": the model itself goes on without some of its layers.
        "lookahead": the model makes a window of guesses better in every step, and what they became is drafted.
    num_speculative_tokens: the most drafts that a step verifies of a request.
    model: the folder or hub id of the draft model or head; None: the one that ships with the embedded model.
    prompt_lookup_min, prompt_lookup_max: how many of the last tokens must have stood there at least, and are compared
        at most. 0: nothing is looked up. With another method than ngram lookup comes first, and the method where that
        finds nothing.
    lookup_recent_tokens: of how many tokens that were emitted lately, by all requests, lookup knows what followed them.
        0: it reads a request's own text alone.
    suffix: how lookup chooses among matches; None: it takes the latest of the longest ones.
    skip_layers: the layers that layer_skip leaves out; None: every other one between the first and the last.
    confidence_threshold: the probability of being right, as DSpark's confidence head has it, below which a draft ends
        those of its row. 0: none does.
    tree: the form of the drafts, if they are more than one chain.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    lookup_recent_tokens: int = 0
    suffix: SuffixRule | None = None
    skip_layers: tuple[int, ...] | None = None
    confidence_threshold: float = 0.0
    tree: DraftTree | None = None

    @property
    def num_drafts(self) -> int:
        """The drafts that a step verifies of a row: all nodes of a tree."""
        return self.num_speculative_tokens if self.tree is None else self.tree.nodes

    @property
    def depth(self) -> int:
        """The drafts of a row that can be right at most."""
        return self.num_speculative_tokens if self.tree is None else self.tree.depth

    @property
    def drafted_ahead(self) -> int:
        """The positions behind a step's tokens at which a draft model or a head writes keys of its drafts."""
        if self.method in (NGRAM, MEDUSA, LOOKAHEAD):
            return 0
        if self.method in BLOCKS:
            return 1 + self.num_speculative_tokens  # the last token is run again, in front of the masks
        return self.num_speculative_tokens if self.tree is None else self.tree.expanded

    @property
    def looked_up(self) -> tuple[int, int]:
        """The tokens that must have stood there at least, and are compared at most."""
        return self.prompt_lookup_min, self.prompt_lookup_max

    @property
    def recent_length(self) -> int:
        """The tokens of an n-gram of recent outputs."""
        return self.prompt_lookup_max if self.suffix is None else min(LOOKUP, self.prompt_lookup_max)

    @property
    def recent_places(self) -> int:
        """The places of the table of recent outputs: a power of two, four for each token or more, so that a token's
        entry outlives as many others with a probability of 0.78 at least."""
        return 1 << (4 * self.lookup_recent_tokens - 1).bit_length() if self.lookup_recent_tokens else 0

    def skipped(self, layers: int) -> tuple[int, ...]:
        """Return the layers that are left out of so many. Raise InvalidConfig if some of them are not there, or if none
        would be left."""
        found = tuple(range(1, layers - 1, 2)) if self.skip_layers is None else self.skip_layers
        if not found or len(found) == layers or max(found) >= layers:
            raise InvalidConfig(
                f"skip_layers of speculative_config is {list(found)}, and the model has {layers} layers; name some of "
                f"0 to {layers - 1}, but not all."
            )
        return found


def speculation_of(given: Mapping[str, object] | None) -> Speculation | None:
    """Return the settings in a user's object, or None if there is none. Raise InvalidConfig."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidConfig(
            'speculative_config must be an object, as {"method": "ngram", "num_speculative_tokens": 4}, '
            f"got {given!r}."
        )
    names = [field.name for field in fields(Speculation) if field.name not in ("tree", "suffix")]
    names += [*TREE_KEYS, *LOOKAHEAD_SIZES, *SUFFIX_KEYS]
    for name, value in given.items():
        if name == "draft_tensor_parallel_size":  # common in scripts, and 1 asks for nothing
            if type(value) is int and value == 1:
                continue
            raise InvalidConfig(
                f"draft_tensor_parallel_size of speculative_config is {value!r}, and each rank has all of the network "
                "that drafts; leave it out."
            )
        if name not in names:
            near = get_close_matches(str(name), names, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}."
            raise InvalidConfig(f"speculative_config has no {name!r}{meant}")
    method, model = given.get("method"), given.get("model")
    if method is None and model is not None:
        method = NGRAM if model in (NGRAM, f"[{NGRAM}]") else DRAFT_MODEL  # as the model's name it is an old form
        model = None if method == NGRAM else model
    if isinstance(method, str) and method.endswith("_mtp"):  # vLLM's names of the layer in each family's checkpoints
        method = MTP
    method = NGRAM if method == f"[{NGRAM}]" else method
    if not isinstance(method, str) or method not in METHODS:
        said = "names no method" if method is None else f"asks for the method {method!r}, which is not supported"
        raise InvalidConfig(f"speculative_config {said}; supported: {', '.join(METHODS)}.")
    if method == SUFFIX:
        return _suffix(given)
    if named := [name for name in SUFFIX_KEYS if given.get(name) is not None]:
        raise InvalidConfig(f"{named[0]} of speculative_config is for the method {SUFFIX}; leave it out.")
    tree = _tree(given, method)
    drafts = tree.depth if tree is not None else _whole(given, "num_speculative_tokens", MOST_DRAFTS)
    if method not in NAMED and model is not None:
        raise InvalidConfig(f'speculative_config has a "model", and the method {method} needs none; leave it out.')
    if model is not None and not (isinstance(model, str | Path) and str(model)):
        raise InvalidConfig(f"model of speculative_config is {model!r}; give the folder or hub id of what is to draft.")
    skipped = given.get("skip_layers")
    if skipped is not None and method != LAYER_SKIP:
        raise InvalidConfig(f"skip_layers of speculative_config is for the method {LAYER_SKIP}; leave it out.")
    least = _number(given, "confidence_threshold", 0.0, 1)
    if least and method not in BLOCKS:
        raise InvalidConfig(f"confidence_threshold of speculative_config is for the method {DSPARK}; leave it out.")
    shortest, longest = _lookup(given, method)
    recent = _whole(given, "lookup_recent_tokens", MOST_RECENT, least=0, default=0)
    if recent and not longest:
        raise InvalidConfig(
            f"lookup_recent_tokens of speculative_config is {recent}, and the method {method} looks nothing up; set "
            "prompt_lookup_max too, or leave it out."
        )
    return Speculation(
        method=method,
        num_speculative_tokens=drafts,
        model=None if model is None else str(model),
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        lookup_recent_tokens=recent,
        skip_layers=None if skipped is None else _layers(skipped),
        confidence_threshold=least,
        tree=tree,
    )


def _suffix(given: Mapping[str, object]) -> Speculation:
    """Return lookup with the rule of suffix decoding. The defaults are vLLM's."""
    others = (
        "model",
        "skip_layers",
        "confidence_threshold",
        "prompt_lookup_min",
        "prompt_lookup_max",
        *TREE_KEYS,
        *LOOKAHEAD_SIZES,
    )
    if named := [name for name in others if given.get(name) is not None]:
        raise InvalidConfig(f"{named[0]} of speculative_config is not for the method {SUFFIX}; leave it out.")
    depth, requests, factor, least = SUFFIX_KEYS
    longest = _whole(given, depth, LONGEST_LOOKUP, default=24)
    remembered = CACHED_TOKENS * _whole(given, requests, MOST_RECENT, least=0, default=10_000)
    remembered = _whole(given, "lookup_recent_tokens", MOST_RECENT, least=0, default=min(MOST_RECENT, remembered))
    drafts = _whole(given, "num_speculative_tokens", LONGEST_LOOKUP, default=longest)
    return Speculation(
        method=NGRAM,
        num_speculative_tokens=min(drafts, MOST_DRAFTS),  # scripts give more, of which rarely many are made
        prompt_lookup_min=1,
        prompt_lookup_max=longest,
        lookup_recent_tokens=remembered,
        suffix=SuffixRule(_number(given, factor, 1.0, LONGEST_LOOKUP), _number(given, least, 0.1, 1)),
    )


def _number(given: Mapping[str, object], name: str, default: float, most: int) -> float:
    value = default if given.get(name) is None else given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidConfig(f"{name} of speculative_config is {value!r}; give a number from 0 to {most}.")
    return float(value)


def _lookup(given: Mapping[str, object], method: str) -> tuple[int, int]:
    """Return the fewest tokens that must be found, and the most that are compared."""
    named = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if given.get(name) is not None]
    if not named:
        return (LOOKUP, LOOKUP) if method == NGRAM else (0, 0)
    lengths = [_whole(given, name, LONGEST_LOOKUP) for name in named]
    if lengths[0] > lengths[-1]:
        raise InvalidConfig(
            f"prompt_lookup_min ({lengths[0]}) is above prompt_lookup_max ({lengths[-1]}); lower it or raise that."
        )
    return lengths[0], lengths[-1]


def _tree(given: Mapping[str, object], method: str) -> DraftTree | None:
    """Return the tree that drafts are to form, or None if they are a chain."""
    sizes = [name for name in LOOKAHEAD_SIZES if given.get(name) is not None]
    if sizes and method != LOOKAHEAD:
        raise InvalidConfig(f"{sizes[0]} of speculative_config is for the method {LOOKAHEAD}; leave it out.")
    named = [name for name in TREE_KEYS if given.get(name) is not None]
    if not named:
        return _lookahead(given) if method == LOOKAHEAD else None
    if method not in BRANCHING:
        methods = ", ".join(BRANCHING)
        raise InvalidConfig(f"{named[0]} of speculative_config is for the methods {methods}; leave it out.")
    if any(given.get(name) is not None for name in ("prompt_lookup_min", "prompt_lookup_max")):
        raise InvalidConfig(
            f"{named[0]} of speculative_config does not go with prompt lookup yet; leave one of them out."
        )
    if named[0] == TREE_KEYS[0]:
        if len(named) > 1:
            raise InvalidConfig(f"speculative_config has {named[0]}, a tree that stays, and {named[1]}; leave one out.")
        tree = static_tree_of(given[named[0]], MOST_DRAFTS)
        count = given.get("num_speculative_tokens")
        if count is not None and (type(count) is not int or count != tree.nodes):
            raise InvalidConfig(
                f"num_speculative_tokens of speculative_config is {count!r}, and speculative_token_tree has "
                f"{tree.nodes} nodes; leave it out."
            )
        return tree
    if method == MEDUSA:
        raise InvalidConfig(
            f"{named[0]} of speculative_config is for heads that read their own drafts; give {MEDUSA} a "
            "speculative_token_tree."
        )
    depth = _whole(given, "num_speculative_tokens", MOST_DRAFTS)
    return dynamic_tree_of(
        depth, _whole(given, "eagle_topk", MOST_NODES), _whole(given, "num_draft_tokens", 1 + MOST_NODES)
    )


def _lookahead(given: Mapping[str, object]) -> DraftTree:
    """Return the tree of lookahead decoding."""
    if any(given.get(name) is not None for name in ("prompt_lookup_min", "prompt_lookup_max")):
        raise InvalidConfig(f"{LOOKAHEAD} drafting does not go with prompt lookup yet; leave prompt_lookup_* out.")
    sizes = LOOKAHEAD_SIZES | {name: given[name] for name in LOOKAHEAD_SIZES if given.get(name) is not None}
    window, ngram, guesses = (_whole(sizes, name, 1 + MOST_NODES) for name in LOOKAHEAD_SIZES)
    if ngram < 2:
        raise InvalidConfig("ngram_size of speculative_config is 1; give at least 2, a token and what follows it.")
    tree, count = lookahead_tree_of(window, ngram, guesses), given.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or count != tree.nodes):
        raise InvalidConfig(
            f"num_speculative_tokens of speculative_config is {count!r}, and the sizes of lookahead decoding make "
            f"{tree.nodes}; leave it out."
        )
    return tree


def _layers(given: object) -> tuple[int, ...]:
    good = isinstance(given, list | tuple) and all(type(each) is int and each >= 0 for each in given)
    if not isinstance(given, list | tuple) or not good or len(set(given)) < len(given):
        raise InvalidConfig(
            f"skip_layers of speculative_config is {repr(given)[:80]}; give a list of layers, the first of which is 0."
        )
    return tuple(sorted(given))


def _whole(given: Mapping[str, object], name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
    value = default if given.get(name) is None else given[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        said = "is missing" if value is None else f"is {value!r}"
        raise InvalidConfig(f"{name} of speculative_config {said}; give a whole number from {least} to {most}.")
    return value
