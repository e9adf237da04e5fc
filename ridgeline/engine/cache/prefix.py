"""The one prefix index: a map of chained block hashes with parent links, which is the radix tree of all prompts.

A node stands for one full block of tokens *and everything before it*: hash = H(parent's hash, tokens). The root is
H(salt, …), so tenants (and later adapters, images, weight versions) never meet. A node remembers, per cache group,
the block that holds its keys and values. The same hashes name blocks to other tiers and to routers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

Hash = bytes


def root_hash(*extra_keys: str) -> Hash:
    """Start of every chain that may share blocks: one per combination of extra keys."""
    return blake2b("\x1f".join(extra_keys).encode("utf-8", "surrogatepass"), digest_size=16, person=b"root").digest()


def chain_hash(parent: Hash, tokens: Sequence[int]) -> Hash:
    """Hash of a block of tokens after `parent`. 128 bits of BLAKE2b: no tenant can construct a collision."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


class Node:
    """One cached block of tokens; `blocks[g]` holds its state for group g (None: not cached there)."""

    __slots__ = ("blocks", "parent")

    def __init__(self, parent: Hash, num_groups: int) -> None:
        self.parent = parent
        self.blocks: list[int | None] = [None] * num_groups


class PrefixIndex:
    """Maps hashes to nodes and back from (group, block) to the hash."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._nodes: dict[Hash, Node] = {}
        self._hash_of: list[dict[int, Hash]] = [{} for _ in range(num_groups)]

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, node_hash: Hash) -> Node | None:
        return self._nodes.get(node_hash)

    def children(self, node_hash: Hash) -> frozenset[Hash]:
        """Cached continuations of a prefix (a root hash works too). Looks at every node: no step asks for them, and
        links kept up to date were a sixth of what publishing costs.
        """
        return frozenset(child for child, node in self._nodes.items() if node.parent == node_hash)

    def published(self) -> Iterator[tuple[int, int, Hash]]:
        """(group, block, hash) of every block that can be matched."""
        return ((g, block, node_hash) for g, known in enumerate(self._hash_of) for block, node_hash in known.items())

    def publish(self, node_hash: Hash, parent: Hash, group: int, block: int) -> bool:
        """Make a block matchable. False when the group already has this content in another block."""
        node = self._nodes.get(node_hash)
        if node is None:
            node = self._nodes[node_hash] = Node(parent, self._num_groups)
        if node.blocks[group] is not None:
            return False
        node.blocks[group] = block
        self._hash_of[group][block] = node_hash
        return True

    def drop(self, group: int, block: int) -> None:
        """The block no longer holds what was published."""
        node_hash = self._hash_of[group].pop(block)
        node = self._nodes[node_hash]
        node.blocks[group] = None
        if all(b is None for b in node.blocks):
            del self._nodes[node_hash]
