"""Lookahead decoding (Fu et al., arXiv 2402.02057): the model drafts for itself, without a draft model or a head.

A row carries a window of guesses of the tokens to come, as levels by columns. Level 0 guesses the next tokens, one for
each column, and each further level of a column guesses the token after the level before. A step draws the token after
the last level, with the levels before as context. Then a column is an n-gram that the model itself has written. It goes
to the slot's pool, and the levels move up by one: Jacobi's iteration, whose older rounds are the upper levels.

The row also carries n-grams of the pool that begin with its last token, to be verified. Everything forms one tree below
the last token, by the bits of its nodes (kernels/base/tree.py):

    window    a node sees level 0 up to its own column, and the levels of its column up to its own
    n-grams   chains, which share the nodes of equal beginnings

A node of the window is right if it is the token drawn behind its parent, as any other node. So the beginning of an
n-gram may lie in the window. Of equal siblings only the first one is ever continued, and n-grams continue from that
one.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    N  nodes of a slot: D + 1; of a step that was cut to fewer, those that it ran
    K  tokens that a row emits, at most
    L  levels of the window
    W  columns of the window
    X  tokens of an n-gram: L + 1
    G  n-grams that are kept for a first token, and verified
    B  buckets of the pool, and one that is never read
    E  n-grams of the pool: G for each bucket
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta, Feature
from ridgeline.core.settings.draft_tree import LookaheadTree
from ridgeline.core.specs.model import LayerSpec
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.proposer import AtOnce, Ran, Taken
from ridgeline.worker.speculation.trees import words_of
from ridgeline.worker.state.states import States
from ridgeline.worker.upload import upload

BUCKETS = 1024  # of a slot's pool: with 7 n-grams of 5 tokens each it takes 140 KiB
NEWEST = 2048  # tokens of a known text whose n-grams are taken into the pool


class Lookahead(AtOnce):
    """A `Proposer` that needs no other network than the model.

    window_SLW: int32, the guesses. pool_SEX: int32, the n-grams: those whose first token falls into bucket b are b * G
    to b * G + G - 1, and -1 where there is none yet. turn_SB: int64, which of a bucket's is overwritten next.
    """

    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()

    def __init__(self, tree: LookaheadTree, slots: Slots, max_model_len: int) -> None:
        self._tree, self._slots, self._max_model_len = tree, slots, max_model_len
        count, device, levels = slots.dummy + 1, slots.device, tree.levels
        self.depth = tree.depth
        self.drafts_SD = torch.full((count, tree.nodes), -1, dtype=torch.int32, device=device)
        parents = window_parents(tree.window, levels)
        bits = [1]
        for node, parent in enumerate(parents, start=1):
            bits.append(bits[parent] | 1 << node)
        self._parent_D = torch.tensor(parents, device=device)
        self._bits_N = words_of(bits).to(device)
        self._in_window = len(parents)
        flat = [*bits, *(1 | 1 << node for node in range(len(bits), 1 + tree.nodes))]
        self._bits_SN = words_of(flat).to(device).repeat(count, 1)
        self.tree_SN: Tensor | None = self._bits_SN
        self.window_SLW = torch.zeros(count, levels, tree.window, dtype=torch.int32, device=device)
        entries = (BUCKETS + 1) * tree.guesses
        self.pool_SEX = torch.full((count, entries, tree.ngram), -1, dtype=torch.int32, device=device)
        self.turn_SB = torch.zeros(count, BUCKETS + 1, dtype=torch.int64, device=device)
        self._guess_G = torch.arange(tree.guesses, device=device)
        self._node_N = torch.arange(1 + tree.nodes, device=device)
        column_W = torch.arange(tree.window, device=device)
        self._before_WW = column_W < column_W[:, None]

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Begin with what slots that change hands have written: pieces of it are the guesses of the window, and its
        n-grams are the pool."""
        for delta in deltas:
            if isinstance(delta, Assign):
                known = (*delta.prompt, *delta.output)
                window_LW = first_window(known, self._tree.levels, self._tree.window)
                pool_EX, turn_B = first_pool(known, self._tree.ngram, self._tree.guesses)
                self.window_SLW[delta.slot] = upload(window_LW, self._slots.device)
                self.pool_SEX[delta.slot] = upload(pool_EX, self._slots.device)
                self.turn_SB[delta.slot] = upload(turn_B, self._slots.device)
                self.drafts_SD[delta.slot].fill_(-1)

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken:
        """Return the step's tokens, to which what is drawn behind them is added."""
        return Taken(ran.token_ids_T, ran.positions_T, ran.start_R1, ran.live_T, None, catching)

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Move the windows of rows that verified theirs, and draft what follows the slots' last tokens: the whole tree
        if any drafts are wanted. Rows that emitted nothing, whose slot has stopped or that are as far from the longest
        context as the tree is deep get none."""
        rows, slots = slots_R.long(), self._slots
        if taken is not None and taken.drawn_RN is not None and taken.drawn_RN.shape[1] > self._in_window:
            self._learn(rows, taken.drawn_RN)
        self.drafts_SD.index_fill_(0, rows, -1)  # a number on the host could not be captured
        if wanted == 0:
            return
        kv_len_R = slots.kv_len_S[rows]
        goes_R = (out_token_RK[:, 0] >= 0) & (slots.stopped_S[rows] == 0) & (kv_len_R + 2 < slots.max_len_S[rows])
        goes_R &= (
            kv_len_R + self.depth < self._max_model_len
        )  # a position behind it has no place in tables of positions
        draft_RD, bits_RN = self._grown(rows)
        self.drafts_SD[rows] = torch.where(goes_R[:, None], draft_RD, -1).int()
        self._bits_SN[rows] = bits_RN

    def _learn(self, rows: Tensor, drawn_RN: Tensor) -> None:
        """Take in what was drawn behind the windows' last levels."""
        width, end = self._tree.window, self._in_window
        last_RW, window_RLW = drawn_RN[:, 1 + end - width : 1 + end].int(), self.window_SLW[rows]
        ran_R = (self.drafts_SD[rows, end - 1] >= 0) & (last_RW >= 0).all(1)
        gram_RXW = torch.cat((window_RLW, last_RW[:, None]), 1)
        self.window_SLW[rows] = torch.where(ran_R[:, None, None], gram_RXW[:, 1:], window_RLW)
        self._collect(rows, gram_RXW.transpose(1, 2), ran_R)

    def _collect(self, rows: Tensor, gram_RWX: Tensor, ran_R: Tensor) -> None:
        """Put n-grams that the pools of the rows' slots have not yet into them, the first columns first. Nothing that
        is looked at is written twice, so the order of writes does not matter."""
        bucket_RW, guesses, before_WW = gram_RWX[..., 0].long() % BUCKETS, self._tree.guesses, self._before_WW
        place_RWG = bucket_RW[..., None] * guesses + self._guess_G
        known_RWG = (self.pool_SEX[rows[:, None, None], place_RWG] == gram_RWX[:, :, None]).all(-1)
        same_RWW = (gram_RWX[:, :, None] == gram_RWX[:, None]).all(-1)
        new_RW = ran_R[:, None] & ~known_RWG.any(-1) & ~(same_RWW & before_WW).any(-1)
        rival_RWW = (bucket_RW[:, :, None] == bucket_RW[:, None]) & new_RW[:, None]
        behind_RW = (rival_RWW & before_WW.T).sum(-1)
        turn_RW = self.turn_SB[rows[:, None], bucket_RW] + (rival_RWW & before_WW).sum(-1)
        stays_RW, ends_RW = new_RW & (behind_RW < guesses), new_RW & (behind_RW == 0)
        place_RW = torch.where(stays_RW, bucket_RW * guesses + turn_RW % guesses, BUCKETS * guesses)
        self.pool_SEX[rows[:, None], place_RW] = gram_RWX
        self.turn_SB[rows[:, None], torch.where(ends_RW, bucket_RW, BUCKETS)] = (turn_RW + 1) % guesses

    def _grown(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the drafts and the bits of all nodes: the window, and the n-grams that begin with the last tokens."""
        tree, count, device = self._tree, len(rows), rows.device
        last_R1 = self._slots.last_token_S[rows][:, None]
        place_RG = last_R1 % BUCKETS * tree.guesses + self._guess_G
        gram_RGX = self.pool_SEX[rows[:, None], place_RG]
        chain_RGL = torch.where((gram_RGX[..., :1] == last_R1[..., None]), gram_RGX[..., 1:], -1)
        root_R1 = torch.full((count, 1), -2, dtype=torch.int32, device=device)  # no token has this number
        token_RN = torch.cat((root_R1, self.window_SLW[rows].flatten(1), chain_RGL.flatten(1)), 1)
        chains = count, tree.guesses * tree.levels
        parent_RN = torch.cat((root_R1.long(), self._parent_D.expand(count, -1), root_R1.new_full(chains, -2)), 1)
        bits_RN = torch.cat((self._bits_N.expand(count, -1), root_R1.new_zeros(chains)), 1)
        at_RG = torch.zeros_like(place_RG)  # the nodes at which the n-grams have come
        for level in range(tree.levels):
            own_G = 1 + self._in_window + self._guess_G * tree.levels + level
            parent_RN[:, own_G] = at_RG
            bits_RN[:, own_G] = bits_RN.gather(1, at_RG) | 1 << own_G
            sibling_RGN = parent_RN[:, None] == at_RG[..., None]
            equal_RGN = sibling_RGN & (token_RN[:, None] == chain_RGL[:, :, level, None])
            at_RG = torch.where(equal_RGN, self._node_N, 1 + tree.nodes).amin(-1)
            token_RN[:, own_G] = torch.where(at_RG == own_G, chain_RGL[:, :, level], -1)
        return token_RN[:, 1:], bits_RN


def pool_bytes(tree: LookaheadTree) -> int:
    """Return the bytes of a slot's pool, and of its places to write next."""
    return (BUCKETS + 1) * (4 * tree.guesses * tree.ngram + 8)


def window_parents(width: int, levels: int) -> list[int]:
    """Return the parents of a window's nodes, which come level by level. Node 0 is the root."""
    first = list(range(width))
    return first + [1 + (level - 1) * width + column for level in range(1, levels) for column in range(width)]


def first_window(known: Sequence[int], levels: int, width: int) -> np.ndarray:
    """Return the guesses with which a window begins: pieces of the known text, at places that depend on nothing but its
    length. int32 [L, W]"""
    start_W = np.random.default_rng(len(known)).integers(0, max(1, len(known) - levels + 1), width)
    place_LW = (start_W + np.arange(levels)[:, None]) % len(known)
    return np.array(known, np.int32)[place_LW]


def first_pool(known: Sequence[int], length: int, guesses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the newest n-grams of a known text as a slot's pool, int32 [E, X], and the places to write next, int64
    [B]."""
    newest, buckets = known[-NEWEST:], dict[int, dict[tuple[int, ...], None]]()
    for gram in zip(*(newest[place:] for place in range(length)), strict=False):
        kept = buckets.setdefault(gram[0] % BUCKETS, {})
        kept.pop(gram, None)  # so that it becomes the last one
        kept[gram] = None
    pool_EX = np.full(((BUCKETS + 1) * guesses, length), -1, np.int32)
    turn_B = np.zeros(BUCKETS + 1, np.int64)
    for bucket, grams in buckets.items():
        last = list(grams)[-guesses:]
        pool_EX[bucket * guesses : bucket * guesses + len(last)] = last
        turn_B[bucket] = len(last) % guesses
    return pool_EX, turn_B
