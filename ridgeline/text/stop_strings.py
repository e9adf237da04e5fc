"""Search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class TrieNode:
    """A state of the automaton, in which `depth` characters of some stop string have been seen.

    `after` maps a matching character to the next state. `fallback` is the state for the longest shorter ending that may
    still become a hit. `stop` is the longest stop string that ends here.
    """

    __slots__ = ("after", "depth", "fallback", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.after: dict[str, TrieNode] = {}
        self.fallback: TrieNode | None = None
        self.stop: str | None = None


@lru_cache(maxsize=256)
def build(stops: tuple[str, ...]) -> TrieNode:
    """Return the start state for `stops` (Aho and Corasick, "Efficient string matching", 1975)."""
    root = TrieNode(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.after.setdefault(char, TrieNode(node.depth + 1))
        node.stop = stop
    queue = deque([root])
    while queue:  # breadth first: a fallback is always shallower, so it is complete when it is needed
        parent = queue.popleft()
        for char, node in parent.after.items():
            node.fallback = step(parent.fallback, char, root) if parent.fallback else root
            node.stop = node.stop or node.fallback.stop
            queue.append(node)
    return root


def step(node: TrieNode, char: str, root: TrieNode) -> TrieNode:
    """Return the state after one more character. A character costs O(1) on average over the text."""
    while char not in node.after:
        if node.fallback is None:
            return root
        node = node.fallback
    return node.after[char]


class StopMatcher:
    """A matcher that finds the stop string that ends first, however the text is cut into pieces. If several end there,
    the longest counts.

    Text is released as soon as no stop string can begin in it. `stop` is the string that was found.
    """

    def __init__(self, stops: tuple[str, ...], *, keep_stop: bool = False) -> None:
        self._root = self._node = build(stops)
        self._keep_stop = keep_stop
        self._held = ""  # not released yet: at least the characters that the state stands for
        self.stop: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Add a piece and return the text that is certain now. With may_stop=False stop strings that end in it are
        ignored."""
        text = self._held + piece
        node, root = self._node, self._root
        for end, char in enumerate(piece, start=len(self._held) + 1):
            node = step(node, char, root)
            if node.stop is not None and may_stop:
                return self._stop_at(text, end, node.stop)
        self._node = node
        safe = len(text) - node.depth
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the text that was held back. No more text comes, so it was no stop string."""
        rest, self._held, self._node = self._held, "", self._root
        return rest

    def _stop_at(self, text: str, end: int, stop: str) -> str:
        self.stop, self._held, self._node = stop, "", self._root
        return text[: end if self._keep_stop else end - len(stop)]
