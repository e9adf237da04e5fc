"""A request while the engine works on it: a sequence of tokens, or two that emit the same ones."""

from __future__ import annotations

from array import array
from collections import Counter
from enum import Enum
from typing import NamedTuple

from ridgeline.core.plan.crossed import CrossedPictures, picture_keys
from ridgeline.core.plan.request import Preemption, Request, RequestStats, drafting
from ridgeline.core.plan.step import Feature, features_of, reports_apart
from ridgeline.engine.cache.checkpoints import Checkpoint


class Status(Enum):
    WAITING = "waiting"  # not admitted yet, or preempted
    ASIDE = "aside"  # while a plan is made: others behind it may start
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"  # ended or aborted; later tokens are dropped


NO_SLOT = -1
ADAPTER = int(Feature.ADAPTER)
SPEECH = int(Feature.SPEECH)


class Rising(NamedTuple):
    """A block of a hit that is in the host's memory alone, and its column in the group's table. node_hash: its name;
    None: the sequence's own copy of a block that it will write to."""

    group: int
    column: int
    below: int
    node_hash: bytes | None


class Sequence:
    """Host state of one request. `tokens` holds what is known: the prompt and every accepted output token.

    blocks: per cache group, block ids from position 0. hashes: of its full blocks, those computed so far. published:
    leading blocks that were published to the prefix index. passed: per cache group, leading blocks that were let go.
    source: per cache group the block that its first plan will copy, held until then; empty if there is none.
    rising: blocks of its hit in the host's memory, until it is admitted. loads: the number of the last load that its
    first row waits for (`HostTier`); 0: it waits for none.
    has_emitted: a token has come since it was admitted. private: runs on without the prefix cache. distrusted: its
    scores were once no numbers. guessable: drafts of its next tokens can be verified. drafts: how many its next rows
    verify. trials: how many of its drafts were right, and how many were tried, the newest most. undrafted: tokens
    since it has no drafts. checkpoint: the last state on its way that the cache keeps. keeps_at: after so many tokens
    it left a state that is published when these are known. has_waited: it let a plan pass for a state that the plan
    leaves behind. heard: how many tokens of its encoder input, the first ones, the cache held when it was admitted.
    runs_again: once preempted, what the device gives up of its blocks is not saved.
    crossed: where the keys of its pictures lie, if layers of cross attention see them. encoded: the tokens of its
    encoder input, or the places of these keys. last_plan: newest plan that may name it, kept when it leaves a slot: it
    may not be planned again before that plan has retired, since a late token may still arrive. overtaken: how many
    requests have started before it that came later. tenant: its place in the policy's list of tenants. text: its tokens
    up to when they were last looked through. companion: of a guided request, the sequence with which its scores are
    compared; it runs in the same plans and takes the same tokens. Only its leader is known as a request, whose status,
    order and times stand for both.
    """

    __slots__ = (
        "_leader",
        "admitted",
        "arrival",
        "blocks",
        "cached_tokens",
        "checkpoint",
        "companion",
        "crossed",
        "distrusted",
        "drafts",
        "encoded",
        "features",
        "first_token",
        "generation",
        "guessable",
        "has_emitted",
        "has_waited",
        "hashes",
        "heard",
        "id",
        "inserted",
        "keeps_at",
        "last_plan",
        "loads",
        "num_logprobs",
        "order",
        "overtaken",
        "passed",
        "preemptions",
        "private",
        "prompt_hit",
        "prompt_logprobs_sent",
        "published",
        "request",
        "rising",
        "runs_again",
        "shared_tokens",
        "slot",
        "source",
        "status",
        "tenant",
        "text",
        "together",
        "tokens",
        "trials",
        "undrafted",
    )

    def __init__(self, request: Request, num_groups: int, leader: Sequence | None = None, block_size: int = 1) -> None:
        self.request = request
        self.id = request.id
        self.tokens = request.input_ids
        features = features_of(request.params, masked=request.token_mask is not None)
        speech = SPEECH if request.speech is not None else 0
        self.features = int(features) | speech | (ADAPTER if request.adapter else 0)
        apart = reports_apart(request.params)
        self.num_logprobs = 0 if apart else request.params.logprobs or 0
        self.status = Status.WAITING
        self.order: tuple = ()
        self.overtaken = 0
        self.tenant = -1
        self.slot = NO_SLOT
        self.generation = 0
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.hashes = list(request.block_hashes)
        self.published = 0
        self.passed = [0] * num_groups
        self.source: list[int] = []
        self.rising: list[Rising] = []
        self.loads = 0
        self.has_emitted = False
        self.checkpoint: Checkpoint | None = None
        self.keeps_at = 0
        self.has_waited, self.heard = False, 0
        self.crossed = picture_keys(request.inserted, block_size) if request.inserted else ()
        self.encoded = self.crossed[-1].end if self.crossed else len(request.encoder_ids)
        self.inserted = request.inserted if request.embeds is None else request.all_inserted
        alone = request.whole or bool(request.encoder_ids)
        self.private = alone or not all(each.key for each in self.inserted)
        self.together: tuple[tuple[int, int], ...] = ()  # tokens that always run in one step
        self.distrusted = self.runs_again = False
        self.cached_tokens = self.shared_tokens = 0
        self.last_plan = 0
        self.prompt_logprobs_sent = 0
        self.arrival = request.arrival
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.preemptions = Counter[Preemption]()
        self.prompt_hit = 0  # tokens found in the cache when it first started
        self._leader = leader
        negative = request.companion()
        self.companion = None if negative is None else Sequence(negative, num_groups, leader=self)
        self.drafts, self.undrafted, self.trials = 0, 0, (0.0, 0.0)
        self.text = array("i")
        # Vectors say nothing of what comes next; logprobs that are reported apart are of one token, and so are guided
        # draws
        masked = request.token_mask is not None
        known = (not masked or drafting(request.token_mask) is not None) and request.embeds is None and not apart
        self.guessable = known and leader is None and negative is None

    @property
    def leader(self) -> Sequence:
        """The sequence of the request that this one belongs to: usually itself."""
        return self._leader or self

    @property
    def members(self) -> tuple[Sequence, ...]:
        """A request's sequences: one, or a guided one's two, the leader first."""
        return (self,) if self.companion is None else (self, self.companion)

    @property
    def unseen(self) -> CrossedPictures:
        """The pictures that layers of cross attention see, with those that the tower has to run over."""
        shown = [each.shown for each in self.inserted if each.across and each.shown is not None]
        known = sum(each.end <= self.heard for each in self.crossed)
        return CrossedPictures(self.crossed, tuple(shown[known:]))

    def identity(self, start: int, end: int) -> list[int]:
        """Return the numbers that stand for tokens in prefix hashes: the tokens, and others for inserted vectors."""
        known = self.tokens[start:end]
        for each in self.inserted:
            for position in range(max(start, each.start), min(end, each.end)):
                known[position - start] = each.identity(position)
        return known

    def make_private(self) -> None:
        """Let the request run on without the prefix cache."""
        for member in self.members:
            member.private = True

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def written(self) -> int:
        """Tokens whose keys are in its blocks for certain: a token or a vector comes from a plan that wrote all before
        it."""
        return len(self.tokens) - (self.request.task is None) if self.has_emitted else 0

    @property
    def reached(self) -> int:
        """The tokens before the last state on its way that the cache keeps."""
        return 0 if self.checkpoint is None else self.checkpoint.length

    @property
    def may_skip(self) -> int:
        """Known tokens that need not run if the cache has them: the last one's logits are wanted, and those of every
        position before a prompt token whose logprob was asked for and not sent yet."""
        last, scored = len(self.tokens) - 1, self.request.params.scored_from
        if scored is None or scored + self.prompt_logprobs_sent >= self.num_prompt:
            return last
        return scored + self.prompt_logprobs_sent - 1

    @property
    def to_read(self) -> int:
        """The number of tokens that run before its next one if it starts anew: its own, and those of its encoder
        input."""
        return len(self.tokens) + self.encoded

    def stats(self, now: float) -> RequestStats:
        """Return the request's statistics as of `now`, in seconds on the engine's clock."""
        return RequestStats(
            arrival=self.arrival,
            first_scheduled=self.admitted,
            first_token=self.first_token,
            finished=now,
            prompt_tokens=self.request.read_tokens,
            cached_tokens=self.prompt_hit,
            output_tokens=len(self.tokens) - self.num_prompt,
            preempted_for=dict(self.preemptions),
        )
