"""The one prefix index: a map of chained block hashes with parent links, which is the radix tree of all prompts.

A node stands for one block of tokens *and everything before it*: hash = H(parent's hash, tokens). The root is H(salt,
…), so tenants (and later adapters, images, weight versions) never share a node. A node remembers, per cache group, the
block that holds its keys and values, on the device and in the host's memory. The same hashes name blocks to other
tiers and to routers.

A prefix of whole blocks is found by hash alone. Where a request ended the tree has *ends*. An end keeps its block's
tokens, so a prompt that begins with the same tokens and then differs can use these first tokens. An end is the one kind
of node whose block need not be full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from struct import Struct, calcsize
from struct import error as struct_error

Hash = bytes
HASH_BYTES = 16
TOKEN_BYTES = calcsize("i")
WIDE_BYTES = 48  # of a number that stands for an inserted vector: a key of 32 bytes, and its place
Tokens = tuple[int, ...]


@lru_cache(1024)
def root_hash(*extra_keys: str) -> Hash:
    """Start of every chain that may share blocks: one per combination of extra keys."""
    found = blake2b(digest_size=16, person=b"root")
    for key in extra_keys:
        text = key.encode("utf-8", "surrogatepass")
        found.update(len(text).to_bytes(8, "little") + text)
    return found.digest()


def tenant_number(salt: str) -> int:
    """Return 64 bits, with a sign, that stand for a salt where its text is not wanted."""
    return int.from_bytes(root_hash(salt)[:8], "little", signed=True)


@lru_cache(256)
def packer(count: int) -> Callable[..., bytes]:
    """Return the function that makes bytes of so many tokens."""
    return Struct(f"{count}i").pack


def chain_hash(parent: Hash, tokens: Sequence[int]) -> Hash:
    """Hash of a block of tokens after `parent`. 128 bits of BLAKE2b: no tenant can construct a collision. Numbers that
    stand for inserted vectors have more bits than tokens."""
    try:
        return blake2b(parent + packer(len(tokens))(*tokens), digest_size=16).digest()
    except struct_error:
        wide = b"".join(token.to_bytes(WIDE_BYTES, "little", signed=True) for token in tokens)
        return blake2b(parent + wide, digest_size=16, person=b"inserted").digest()


def next_hash(parent: Hash, tokens: Sequence[int], pack: Callable[..., bytes]) -> Hash:
    """Return `chain_hash` of a full block of plain tokens. pack: makes bytes of so many."""
    return blake2b(parent + pack(*tokens), digest_size=16).digest()


def chain_hashes(parent: Hash, tokens: Sequence[int], size: int) -> list[Hash]:
    """Return the hash of each block of `size` tokens after `parent`, as `chain_hash` has it."""
    if len(tokens) == size:
        return [chain_hash(parent, tokens)]
    try:
        data, width = packer(len(tokens))(*tokens), size * TOKEN_BYTES
    except struct_error:
        blocks = (tokens[n : n + size] for n in range(0, len(tokens), size))
        return [*accumulate(blocks, chain_hash, initial=parent)][1:]
    found = list[Hash]()
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=16).digest()
        found.append(parent)
    return found


class Node:
    """One cached block of tokens; `blocks[g]` holds its state for group g (None: not cached there).

    below: the same for blocks in the host's memory. end: its tokens, while it is an end. salt: of the prompts that it
    belongs to, where that is noted: of full blocks, if there is a tier on a disk.
    """

    __slots__ = ("below", "blocks", "end", "parent", "salt")

    def __init__(self, parent: Hash, nothing: tuple[None, ...]) -> None:
        self.parent = parent
        self.blocks: list[int | None] = [*nothing]
        self.below: Sequence[int | None] = nothing
        self.end: Tokens | None = None
        self.salt: str | None = None


class PrefixIndex:
    """Maps hashes to nodes and back from (group, block) to the hash."""

    def __init__(self, num_groups: int) -> None:
        self._nothing = (None,) * num_groups
        self._nodes: dict[Hash, Node] = {}
        self._hash_of: list[dict[int, Hash]] = [{} for _ in range(num_groups)]
        self._hash_below: list[dict[int, Hash]] = [{} for _ in range(num_groups)]
        # Ends by parent, sorted. No end begins another, which would serve for both: so those that agree most with any
        # tokens stand where these would
        self._ends: dict[Hash, list[tuple[Tokens, Hash]]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, node_hash: Hash) -> Node | None:
        return self._nodes.get(node_hash)

    def hash_of(self, group: int, block: int) -> Hash | None:
        """Return the hash under which a block can be matched."""
        return self._hash_of[group].get(block)

    def hash_below(self, group: int, block: int) -> Hash | None:
        """Return the hash under which a block in the host's memory can be matched."""
        return self._hash_below[group].get(block)

    @property
    def has_below(self) -> bool:
        """Return True if some block in the host's memory can be matched."""
        return any(self._hash_below)

    def hashes(self) -> list[Hash]:
        """Return the hashes of all nodes."""
        return list(self._nodes)

    def children(self, node_hash: Hash) -> frozenset[Hash]:
        """Cached continuations of a prefix (a root hash works too). Looks at every node: no step asks for them, and
        links kept up to date were a sixth of what publishing costs.
        """
        return frozenset(child for child, node in self._nodes.items() if node.parent == node_hash)

    def with_continuations(self, node_hashes: Iterable[Hash]) -> set[Hash]:
        """Return those of these nodes that are cached, and all cached nodes after them. It looks at every node, as
        `children` does."""
        children: dict[Hash, list[Hash]] = {}
        for node_hash, node in self._nodes.items():
            children.setdefault(node.parent, []).append(node_hash)
        found, ahead = set[Hash](), list(node_hashes)
        while ahead:
            known = ahead.pop()
            if known not in found:
                found.add(known)
                ahead += children.get(known, [])
        return found & self._nodes.keys()

    def published(self) -> Iterator[tuple[int, int, Hash]]:
        """(group, block, hash) of every block that can be matched."""
        return ((g, block, node_hash) for g, known in enumerate(self._hash_of) for block, node_hash in known.items())

    def publish(self, node_hash: Hash, parent: Hash, group: int, block: int) -> bool:
        """Make a block matchable. False when the group already has this content in another block. The next plan may be
        what writes it, so it is no end any more: a block to copy would be copied before that."""
        node = self._nodes.get(node_hash)
        if node is None:
            node = self._nodes[node_hash] = Node(parent, self._nothing)
        elif node.blocks[group] is not None:
            return False
        elif node.end is not None:
            self._no_end(node_hash, node, node.end)
        node.blocks[group] = block
        self._hash_of[group][block] = node_hash
        return True

    def drop_all(self, group: int, blocks: Iterable[int]) -> None:
        """These blocks no longer hold what was published. There is one group, and nothing below it."""
        hash_of, nodes = self._hash_of[group], self._nodes
        for block in blocks:
            node_hash = hash_of.pop(block)
            node = nodes.pop(node_hash)
            if node.end is not None:
                self._no_end(node_hash, node, node.end)

    def drop(self, group: int, block: int) -> None:
        """The block no longer holds what was published."""
        node_hash = self._hash_of[group].pop(block)
        node = self._nodes[node_hash]
        node.blocks[group] = None
        self._lost(node_hash, node, group)

    def publish_run(
        self, run: Iterable[tuple[Hash, int]], parent: Hash, mark: Callable[[int, int], None]
    ) -> list[Hash]:
        """Make blocks of the first group matchable, each the continuation of the one before, as `publish` does; those
        that are 0 are left out. mark: called with the group and each block that is new. Return the new hashes."""
        nodes, nothing, hash_of, fresh = self._nodes, self._nothing, self._hash_of[0], list[Hash]()
        for node_hash, block in run:
            if block:
                node = nodes.get(node_hash)
                if node is None:
                    node = nodes[node_hash] = Node(parent, nothing)
                    node.blocks[0] = block
                    hash_of[block] = node_hash
                    mark(0, block)
                    fresh.append(node_hash)
                elif self.publish(node_hash, parent, 0, block):
                    mark(0, block)
                    fresh.append(node_hash)
            parent = node_hash
        return fresh

    def save(self, node_hash: Hash, parent: Hash, group: int, block: int) -> None:
        """Make a block in the host's memory matchable. The group has no other one below."""
        node = self._nodes.get(node_hash)
        if node is None:
            node = self._nodes[node_hash] = Node(parent, self._nothing)
        node.below = [*node.below[:group], block, *node.below[group + 1 :]]
        self._hash_below[group][block] = node_hash

    def drop_below(self, group: int, block: int) -> None:
        """The block in the host's memory no longer holds what was saved."""
        node_hash = self._hash_below[group].pop(block)
        node = self._nodes[node_hash]
        node.below = [*node.below[:group], None, *node.below[group + 1 :]]
        self._lost(node_hash, node, group)

    def _lost(self, node_hash: Hash, node: Node, group: int) -> None:
        if node.blocks[group] is not None or node.below[group] is not None:
            return
        if node.end is not None:
            self._no_end(node_hash, node, node.end)
        nothing = self._nothing
        if node.blocks.count(None) == len(nothing) and (node.below is nothing or not any(map(_there, node.below))):
            del self._nodes[node_hash]

    # ---- ends -------------------------------------------------------------------------------------------------

    def has_ends(self, parent: Hash) -> bool:
        return parent in self._ends

    def is_covered(self, parent: Hash, tokens: Tokens) -> bool:
        """Return True if an end after `parent` begins with these tokens."""
        ends = self._ends.get(parent, [])
        at = bisect_left(ends, (tokens,))
        return at < len(ends) and ends[at][0][: len(tokens)] == tokens

    def shorter_end(self, parent: Hash, tokens: Tokens) -> Hash | None:
        """The end after `parent` that these tokens begin with, if there is one."""
        ends = self._ends.get(parent, [])
        at = bisect_left(ends, (tokens,))
        return ends[at - 1][1] if at and tokens[: len(ends[at - 1][0])] == ends[at - 1][0] else None

    def add_end(self, node_hash: Hash, tokens: Tokens) -> None:
        """Make a node an end. Every group has its block; no end begins with its tokens, nor it with theirs."""
        node = self._nodes[node_hash]
        node.end = tokens
        insort(self._ends.setdefault(node.parent, []), (tokens, node_hash))

    def nearest_end(self, parent: Hash, tokens: Tokens) -> tuple[int, Hash | None]:
        """Return the length of the longest beginning of these tokens that an end after `parent` has, and that end."""
        ends = self._ends.get(parent)
        if not ends:
            return 0, None
        at = bisect_left(ends, (tokens,))
        near = [(common(tokens, end), node_hash) for end, node_hash in ends[max(0, at - 1) : at + 1]]
        return max(near, key=lambda found: found[0])

    def _no_end(self, node_hash: Hash, node: Node, tokens: Tokens) -> None:
        ends, node.end = self._ends[node.parent], None
        del ends[bisect_left(ends, (tokens, node_hash))]
        if not ends:
            del self._ends[node.parent]


def _there(block: int | None) -> bool:
    return block is not None


def common(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
