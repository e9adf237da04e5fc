"""Trees of drafts, as data: several tokens may be drafted for one place, and each of them is gone on from.

The nodes of a row are numbered: 0 is its last token, and 1 … N are the drafts, those of a smaller depth first. A node
is drafted by *expanding* its parent, that is, by scoring what follows it. Among the tokens that may follow a node, the
one of rank 0 is the likeliest.
"""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig

MOST_NODES = 63  # drafts of a row: with its last token they are the bits of a word
LONGEST_TEXT = 10_000  # characters of a tree
Path = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """The size of a tree, whatever its form.

    nodes: the drafts that a step verifies of a row.
    depth: how many of them can be right at most.
    width: the most tokens that are drafted behind one node.
    expanded: how many drafts are expanded, beside the last token.
    """

    nodes: int
    depth: int
    width: int
    expanded: int

    @property
    def scored(self) -> int:
        """The nodes of a row that are expanded at once, at most: so many rows of scores a row has then."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Level:
    """The drafts of one depth of a static tree.

    parents, ranks: by draft, which of the nodes that were expanded for this level it follows, and its rank among what
        follows.
    expanded: those of the level that are expanded in their turn, ascending.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    expanded: tuple[int, ...]

    @property
    def width(self) -> int:
        return 1 + max(self.ranks)


@dataclass(frozen=True, kw_only=True)
class StaticTree(DraftTree):
    """A tree whose form never changes. paths: by draft, the ranks from the last token on."""

    paths: tuple[Path, ...]

    @property
    def scored(self) -> int:
        return max(1, *(len(level.expanded) for level in self.levels))

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each draft, a node."""
        node = {(): 0} | {path: index for index, path in enumerate(self.paths, start=1)}
        return tuple(node[path[:-1]] for path in self.paths)

    @property
    def bits(self) -> tuple[int, ...]:
        """The path to each node, with the node itself, as bits of node numbers. Node 0 is the last token."""
        found = [1]
        for index, parent in enumerate(self.parents, start=1):
            found.append(found[parent] | 1 << index)
        return tuple(found)

    @property
    def levels(self) -> tuple[Level, ...]:
        made, before = list[Level](), list[Path]([()])
        for depth in range(1, self.depth + 1):
            level = [path for path in self.paths if len(path) == depth]
            inner = {path[:-1] for path in self.paths if len(path) == depth + 1}
            expanded = tuple(index for index, path in enumerate(level) if path in inner)
            parents = tuple(before.index(path[:-1]) for path in level)
            made.append(Level(parents=parents, ranks=tuple(path[-1] for path in level), expanded=expanded))
            before = [level[index] for index in expanded]
        return tuple(made)


@dataclass(frozen=True, kw_only=True)
class DynamicTree(DraftTree):
    """A tree whose form follows the scores (EAGLE-2: Li et al., arXiv 2406.16858).

    At each depth the `width` most promising drafts are expanded, by `width` tokens each, and of all drafts the `nodes`
    most promising are verified. How promising one is says the product of the probabilities on the way to it.
    """

    @property
    def scored(self) -> int:
        return self.width if self.expanded else 1


@dataclass(frozen=True, kw_only=True)
class LookaheadTree(DraftTree):
    """A window of guesses that every step makes better, and n-grams that they became before, which are verified (Fu et
    al., arXiv 2402.02057).

    window: the guesses of a level, one behind the other.
    ngram: the tokens of an n-gram. The window has one level less.
    guesses: the n-grams that are kept for one first token, and verified where that is a row's last token.
    """

    window: int
    ngram: int
    guesses: int

    @property
    def levels(self) -> int:
        return self.ngram - 1


def lookahead_tree_of(window: int, ngram: int, guesses: int) -> LookaheadTree:
    """Return the tree of the three sizes. Raise InvalidConfig if it has too many nodes."""
    nodes = (window + guesses) * (ngram - 1)
    if nodes > MOST_NODES:
        raise InvalidConfig(
            f"window_size {window}, ngram_size {ngram} and verification_set_size {guesses} of speculative_config make "
            f"(window_size + verification_set_size) * (ngram_size - 1) = {nodes} drafts, and a row has at most "
            f"{MOST_NODES}; lower one of them."
        )
    return LookaheadTree(
        nodes=nodes,
        depth=window + ngram - 2,
        width=guesses + 1,
        expanded=0,
        window=window,
        ngram=ngram,
        guesses=guesses,
    )


def static_tree_of(given: object, deepest: int) -> StaticTree:
    """Return the tree of a list of paths, or of such a list as text. Raise InvalidConfig."""
    name, paths = "speculative_token_tree of speculative_config", given
    if isinstance(given, str):
        try:
            paths = literal_eval(given) if len(given) <= LONGEST_TEXT else None
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            paths = None
    if not isinstance(paths, list | tuple) or not paths or not all(_is_path(path) for path in paths):
        raise InvalidConfig(
            f"{name} is {repr(given)[:80]}; give the list of all paths, as in [(0,), (1,), (0, 0)], where each number "
            f"from 0 to {MOST_NODES - 1} is the rank of a draft behind the one before."
        )
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    there = {(), *ordered}
    orphan = next((path for path in ordered if path[:-1] not in there), None)
    if orphan is not None:
        raise InvalidConfig(f"{name} has the path {orphan}, and not {orphan[:-1]}; add that.")
    if len(ordered) < len(paths):
        twice = next(path for path, count in Counter(map(tuple, paths)).items() if count > 1)
        raise InvalidConfig(f"{name} has the path {twice} twice; leave one out.")
    if len(ordered) > MOST_NODES or len(ordered[-1]) > deepest:
        raise InvalidConfig(
            f"{name} has {len(ordered)} nodes and is {len(ordered[-1])} deep; give at most {MOST_NODES} nodes and a "
            f"depth of {deepest}."
        )
    return StaticTree(
        nodes=len(ordered),
        depth=len(ordered[-1]),
        width=1 + max(path[-1] for path in ordered),
        expanded=len({path[:-1] for path in ordered}) - 1,
        paths=tuple(ordered),
    )


def _is_path(given: object) -> bool:
    good = isinstance(given, list | tuple) and len(given) > 0
    return good and all(type(rank) is int and 0 <= rank < MOST_NODES for rank in given)  # type: ignore[attr-defined]


def dynamic_tree_of(depth: int, width: int, tokens: int) -> DynamicTree:
    """Return the tree of SGLang's three numbers: tokens counts the row's last token too. Raise InvalidConfig."""
    expanded, nodes = width * (depth - 1), tokens - 1
    if expanded > MOST_NODES:
        raise InvalidConfig(
            f"eagle_topk of speculative_config is {width} and num_speculative_tokens {depth}: with them {expanded} "
            f"drafts are gone on from, and {MOST_NODES} can be; lower one of them."
        )
    most = width + width * expanded
    if not depth <= nodes <= min(most, MOST_NODES):
        raise InvalidConfig(
            f"num_draft_tokens of speculative_config is {tokens}; give a number from {depth + 1} to "
            f"{1 + min(most, MOST_NODES)}, the row's last token included."
        )
    return DynamicTree(nodes=nodes, depth=depth, width=width, expanded=expanded)
