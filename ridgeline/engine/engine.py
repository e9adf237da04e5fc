"""The step loop: schedule, submit, collect, update."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ridgeline.core.clock import MONOTONIC, Clock
from ridgeline.core.errors import ContractViolation, DeviceLost, InvalidConfig, InvalidRequest
from ridgeline.core.plan.cache_figures import CacheFigures
from ridgeline.core.plan.crossed import MOST_PICTURES, MOST_RUNS, picture_keys
from ridgeline.core.plan.embeds import Embeds, named_within
from ridgeline.core.plan.octets import SharedOctets
from ridgeline.core.plan.request import MAX_STOP_IDS, Request, RequestStats, SamplingParams, StepEvents
from ridgeline.core.plan.sleep import KINDS, Kind
from ridgeline.core.plan.sounds import Waveform
from ridgeline.core.plan.step import StepPlan, StepResult
from ridgeline.core.plan.worker import KeepsBelow, Rests, Sleeps, Worker
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import NO_RULES, OutputRules
from ridgeline.engine.cache.disk import BlockStore
from ridgeline.engine.cache.events import BlockSink, Changes
from ridgeline.engine.masks import constrained
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.together import runs_of
from ridgeline.kernels.base.cost import CostModel, Headroom, StepShape

logger = logging.getLogger(__name__)

# Steps that failed in a row, and seconds without one that went well, after which no request is to blame any more. Both:
# requests that make a step fail run alone, one after the other, and many of them fail within a moment.
FAILED_STEPS, FAILING_SECONDS = 32, 5.0
DISK_WAIT = 2e-3  # seconds after which a step that waits for the disk alone ends, so that new requests are seen
RESTING = 5.0  # milliseconds for which blocks are moved while there is no request
LEAVING = 10.0  # seconds, about, in which blocks still go to the disk when the engine ends
REHEARSALS = 12  # Python looks at a function for about that many calls before it has made it fast


class Engine:
    """Runs requests on one worker. Not thread-safe: one thread adds, aborts and steps.

    headroom: time of all steps so far, beside their limit by `cost_model`. last_plan: whose result came last; None if
        no plan was in flight then. clock: the engine, its scheduler and cache read no other one; `Request.arrival` must
        be of the same. output_rules: those of the model.

    Once a step has shown that the device is lost, that step, and every `add` and `step` after it, raises DeviceLost.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        worker: Worker,
        *,
        vocab_size: int,
        cost_model: CostModel | None = None,
        clock: Clock = MONOTONIC,
        output_rules: OutputRules = NO_RULES,
    ) -> None:
        self.config, self._output_rules = config, output_rules
        self.layout = layout
        self.scheduler = Scheduler(config, layout, cost_model, clock)
        self._clock = clock
        self._worker = worker
        if (tier := self.scheduler.cache.tier) is not None and isinstance(worker, KeepsBelow):
            tier.memory = worker
        self._vocab_size = vocab_size
        self._cost_model = cost_model
        self.headroom = Headroom()
        self.last_plan: StepPlan | None = None
        self._ran: int | None = None  # tokens of its step, where they are not those that were planned
        self._reach: dict[int, float] = {}  # bits of a step's number of tokens → `ExpertLoad.reach` of the newest one
        self._submitted: deque[tuple[StepPlan, float]] = deque()  # in flight, with the least seconds; 0: not known
        self._failed_in_a_row, self._failing_since = 0, 0.0
        self._lost: str | None = None  # why nothing runs any more
        self._paused, self._sleeps = False, False
        self._blocks: BlockSink | None = None  # is told of changes of the prefix cache

    def on_finish(self, listener: Callable[[Request, RequestStats], None]) -> None:
        """Call `listener` whenever a request ends, however it does."""
        self.scheduler.on_finish = listener

    def on_begin(self, listener: Callable[[list[Request]], None]) -> None:
        """Call `listener` with requests that run for the first time, before the worker is given their plan."""
        self.scheduler.on_begin = listener

    def without_headroom(self) -> None:
        """Count no `headroom` from now on: that asks the cost model about every plan."""
        self._cost_model = None

    def tell_blocks(self, sink: BlockSink) -> None:
        """Tell `sink` from now on which blocks can be found in the prefix cache, after each step that changes that. It
        is closed with the engine."""
        self._blocks = sink
        self.scheduler.cache.published.changes = changes = Changes(self.layout.block_size)
        changes.cleared()
        self._tell()

    def keep_on_disk(self, store: BlockStore, memory: KeepsBelow | None = None) -> None:
        """Let blocks go from the host's memory to a store, and come back. The store is closed with the engine. There
        is a tier in the host's memory. memory: lets others read and write its blocks; None: the worker does."""
        if memory is None:
            assert isinstance(self._worker, KeepsBelow)
            memory = self._worker
        self.scheduler.keep_on_disk(store, memory)

    def rest(self) -> bool:
        """Do a piece of what is left to do while there is no request: let the worker prepare steps, and move some of
        the blocks that are on their way to the host's memory, or from there to the disk. Return True if there is more
        to do."""
        if self._paused or self._sleeps or self._lost is not None or self.scheduler.in_flight:
            return False
        more = isinstance(self._worker, Rests) and self._worker.rest()
        return self._move_below() or more

    def _move_below(self) -> bool:
        """Move some blocks, and return True if there are more to move."""
        tier = self.scheduler.cache.tier
        if tier is None or tier.disk is None or tier.memory is None:
            return False
        self.scheduler.recovered()  # what plans that failed should have moved is not there, and nobody may plan again
        plan = self.scheduler.newest_plan
        if (sessions := self.scheduler.cache.sessions) is not None:
            sessions.tick()
        tier.disk.arrivals()  # of what is read ahead: no request waits
        if (moves := tier.moves(plan, lambda: RESTING, 0)) is not None:
            try:
                tier.memory.move(plan, moves)
            except RuntimeError as error:  # of the device; the next step says more
                logger.warning("blocks of the cache could not be moved: %s", error)
                tier.undo()
                return False
        tier.retire(plan)
        return tier.is_busy

    def _tell(self) -> None:
        changes = self.scheduler.cache.published.changes
        if self._blocks is not None and changes is not None and (found := changes.take()):
            self._blocks.take(found)

    @property
    def has_work(self) -> bool:
        """True if a step would do something. A paused engine has only the plans in flight to wait for."""
        work = bool(self.scheduler.in_flight) if self._paused else self.scheduler.has_work
        return work and self._lost is None

    def pause(self) -> None:
        """Make no further plan until `resume`. Requests stay where they are, and more can be added and aborted."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @property
    def asleep(self) -> bool:
        """True from `sleep` until all memory is back."""
        return self._sleeps

    def add(self, request: Request, *, checked: bool = False) -> None:
        """Queue a request. Raise InvalidRequest if it could never run; not asked if `checked`, since `check` was."""
        self._check_device()
        if not checked:
            self.check(request)
        if self.config.adapted_encoders and request.adapter:  # whose content is one of its keys
            request = replace(request, inserted=named_within(request.inserted, "/".join(request.prefix_keys)))
        self.scheduler.add(constrained(request, self._vocab_size, self._output_rules))

    def abort(self, request_id: str, at_token: int | None = None) -> bool:
        """End a request at once: its client left, or a stop string was complete with output token `at_token`.

        False if it had already ended. No event follows.
        """
        found = self.scheduler.abort(request_id, at_token)
        self._tell()  # there may be no further step
        return found

    def step(self) -> StepEvents:
        """Keep the worker supplied, then wait for the oldest plan's result. Empty when there was nothing to do."""
        self.fill()
        return self.take()

    def take(self) -> StepEvents:
        """Wait for the oldest plan's result. Empty if no plan is in flight."""
        if not self.scheduler.in_flight:
            self.last_plan = None
            self.scheduler.await_disk(DISK_WAIT)
            return StepEvents()
        result = self._worker.collect()
        events = self.scheduler.update(result, None if self._reach else self._submitted[0][1])
        self._account(result)
        self._provide_masks()
        if self._blocks is not None:
            self._tell()
        return events

    @property
    def last_tokens(self) -> int:
        """The tokens that the step of `last_plan` ran."""
        if self.last_plan is None:
            return 0
        return self.last_plan.num_tokens if self._ran is None else self._ran

    def rehearse(self) -> None:
        """Run some tiny requests and forget them. Code, kernels and memory are prepared when they are first used, and
        the first user's request should not wait for that."""
        length = min(8, self.config.max_model_len - 2)
        if self.config.pools:  # long ones take other kernels
            length = min(512, self.config.max_model_len, self.config.max_num_batched_tokens)
        for number, together in enumerate(self._rehearsals(length)):
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            request = Request(
                id="",
                prompt_token_ids=(0,) * length,
                params=params,
                seed=0,
                max_total_tokens=length if self.config.pools else length + 2,
                task="embed" if self.config.pools else None,
                whole=self.config.pools,
                encoder_ids=(0,) * (self.config.encodes if self.config.hears else min(8, self.config.encodes)),
                sound=Waveform(samples=SharedOctets(b"")) if self.config.hears else None,
            )
            for copy in range(together):
                known = number - (number == REHEARSALS - 1)  # one finds what the one before left
                self.add(replace(request, id=f"rehearsal {number} {copy}", cache_salt=f"rehearsal {known} {copy}"))
            while self.has_work:
                self.step()
        self.headroom = Headroom()
        self._reach.clear()
        self.scheduler.cache.forget_all()

    def _rehearsals(self, length: int) -> list[int]:
        """Return the numbers of requests of `length` tokens that run together, one per rehearsal. Where prompts end
        with vectors, the last ones fill larger and larger steps, since kernels are compiled for their sizes and there
        are no graphs."""
        if length <= 0:
            return []
        most = min(self.config.max_num_seqs, self.config.max_num_batched_tokens // length) if self.config.pools else 1
        return [1] * REHEARSALS + [1 << power for power in range(1, most.bit_length())]

    def census(self) -> list[CacheFigures]:
        """Return the figures of the cache; of several engines that act as one, those of each."""
        return [self.scheduler.census()]

    def forget_prefixes(self) -> None:
        """Let no later request find anything in the prefix cache. Those that run keep what they have found."""
        self.scheduler.cache.forget_prefixes()
        self.scheduler.pictures.forget()
        self._tell()

    def renew_weights(self, version: str) -> None:
        """Let no later request find what older weights have cached. Requests that run keep what they have found, and
        those that wait find only what the new ones cache. version: a name that no other weights have. No step may be
        in flight."""
        self.scheduler.renew_weights(version)
        self._tell()

    def sleep(self) -> None:
        """Give the device's memory back. Requests that run start over after `wake`, and go on with the same tokens.
        The engine must be paused, with no step in flight. Raise InvalidConfig if its worker cannot."""
        assert self._paused
        assert not self.scheduler.in_flight
        worker = self.sleeper()
        self.scheduler.vacate()
        self._tell()
        worker.sleep()
        self._sleeps = True

    def sleeper(self) -> Sleeps:
        """Return the worker. Raise InvalidConfig if it cannot sleep."""
        if not isinstance(self._worker, Sleeps):
            raise InvalidConfig("several ranks cannot sleep at level 1; ask for level 2.")
        if self._worker.wakeful is not None:
            raise InvalidConfig(f"{self._worker.wakeful}.")
        return self._worker

    def wake(self, kinds: Sequence[Kind] = KINDS) -> None:
        """Bring memory of these kinds back. Raise InvalidConfig if others have taken it."""
        assert isinstance(self._worker, Sleeps)
        self._sleeps = not self._worker.wake(kinds)

    def shutdown(self) -> None:
        self.tell_no_more()
        self.leave_disk()
        self._worker.shutdown()

    def leave_disk(self) -> None:
        """Write what is in the cache to the disk, if there is one, in a bounded time. The worker still runs."""
        if (tier := self.scheduler.cache.tier) is not None:
            tier.leave()
        tier, until = self.scheduler.cache.tier, self._clock() + LEAVING
        if tier is None or tier.disk is None:
            return
        disk = tier.disk
        try:
            self.pause()
            while self.has_work:
                self.take()
            self.resume()
            while self.rest() and self._clock() < until:
                disk.wait_for_writes(DISK_WAIT)
        except DeviceLost:
            pass
        finally:
            self.scheduler.leave_disk(max(1.0, until - self._clock()))

    def tell_no_more(self) -> None:
        """Close what is told of the prefix cache."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = self.scheduler.cache.published.changes = None

    def fill(self) -> None:
        """Keep the worker supplied with plans."""
        self._check_device()
        while not self._paused and len(self.scheduler.in_flight) < self.config.lookahead_depth:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self._worker.submit(plan)
            self._provide_masks()
            # Now, while the device is busy with it
            limit = 0.0 if self._cost_model is None else self._cost_model.step_limit(self.shape_of(plan))
            self._submitted.append((plan, limit))

    def _account(self, result: StepResult) -> None:
        """Add a step's time to the sum. Raise DeviceLost where it is no use to go on."""
        self.last_plan, limit = self._submitted.popleft()
        self._ran = result.num_tokens
        if result.elapsed > 0:  # it ran
            self.headroom = self.headroom.plus(result.elapsed, limit)
        if result.experts is not None:
            self._reach[result.experts.step_tokens.bit_length()] = result.experts.reach
        if result.error is None:
            self._failed_in_a_row *= result.dropped
            return
        now = self._clock()
        if not self._failed_in_a_row:
            self._failing_since = now
        self._failed_in_a_row += not result.out_of_memory
        failing = self._failed_in_a_row >= FAILED_STEPS and now - self._failing_since >= FAILING_SECONDS
        if result.device_lost or failing:
            why = "" if result.device_lost else f"{self._failed_in_a_row} steps in a row failed, the last with "
            self._lost = f"{why}{result.error.splitlines()[0]}"
            self._check_device()

    def _check_device(self) -> None:
        if self._lost is not None:
            raise lost_device(self._lost)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """Return the shape that decides the plan's cost, with the experts that steps of about this size reach, if such
        a step was sampled."""
        return plan.shape(self._reach.get(plan.num_tokens.bit_length(), 1.0) if self._reach else 1.0)

    def _provide_masks(self) -> None:
        """A plan's masks follow from all tokens before it, so they are due when it is the oldest in flight."""
        due = self.scheduler.masks_due()
        if due is not None:
            self._worker.provide_masks(*due)

    def _check_embeds(self, request: Request, embeds: Embeds) -> None:
        if len(embeds) != len(request.prompt_token_ids):
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_token_ids)} places and {len(embeds)} vectors; give as many.",
                param="prompt_embeds",
            )
        params = request.params
        for param, asked in (
            ("prompt_logprobs", params.prompt_logprobs is not None),
            ("guidance_scale", params.guidance_scale != 1),
        ):
            if asked:
                raise InvalidRequest(f"{param} needs a prompt of tokens, not prompt_embeds; leave it out.", param=param)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, in one sentence, for a request that could never run."""
        if request.adapter and not self.config.max_loras:
            raise InvalidRequest("this engine runs without adapters; start it with enable_lora.", param="lora_request")
        if (request.task is not None) is not self.config.pools:
            does, not_that = ("embeds or classifies", "generate") if self.config.pools else ("generates", "pool")
            raise InvalidRequest(f"this model {does} and cannot {not_that}; ask another one.", param="model")
        if request.task is not None:
            self._check_pooled(request)
            if self.config.both_ways is not None:
                self._check_together(request)
            return
        if request.encoder_ids or self.config.encodes:
            self._check_encoded(request)
        self._check_prompt(request.prompt_token_ids, "decoder prompt" if request.encoder_ids else "prompt")
        if request.embeds is not None:
            self._check_embeds(request, request.embeds)
        if request.inserted:
            check_inserted(request)
            self._check_pictures(request)
        if self.config.both_ways is not None:
            self._check_together(request)
        companion = request.companion()
        members = [request] if companion is None else [request, companion]
        if companion is not None:
            self._check_prompt(companion.prompt_token_ids, "negative_prompt")
            if min(self.config.max_num_seqs, self.config.max_num_batched_tokens) < 2:
                raise InvalidRequest(
                    "a request with guidance_scale runs as two sequences at once; it needs max_num_seqs and "
                    "max_num_batched_tokens of at least 2.",
                    param="guidance_scale",
                )
        limit, max_chunk = self.config.max_model_len, self.config.max_num_batched_tokens
        for member in members:
            length, total = len(member.prompt_token_ids), member.max_total_tokens
            if not length < total <= limit:
                name = "prompt" if member is request else "negative prompt"
                raise InvalidRequest(
                    f"max_total_tokens is {total}; it must exceed the {name}'s {length} tokens and stay within the "
                    f"context of {limit}.",
                    param="max_tokens",
                )
        if len(request.all_stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"{len(request.all_stop_ids)} token ids end the request, the model's own included; at most "
                f"{MAX_STOP_IDS} can.",
                param="stop_token_ids",
            )
        ahead = self.config.drafted_ahead
        more = self.config.num_drafts + ahead
        encoded = len(request.encoder_ids) + (self._check_crossed(request) if request.inserted else 0)
        needed = sum(
            self.layout.pages_needed(member.max_total_tokens + more, max_chunk + ahead, encoded) for member in members
        )
        if needed > self.layout.num_pages - 1:
            total, name = sum(member.max_total_tokens for member in members), "prompt and max_tokens together"
            if companion is not None:
                name = "prompt and negative prompt, each with max_tokens, together"
            raise InvalidRequest(
                f"{name} are {total} tokens, more than the KV cache can ever hold; lower max_tokens or give the cache "
                f"more memory (kv_cache_memory).",
                param="max_tokens",
            )

    def _check_pictures(self, request: Request) -> None:
        """Raise InvalidRequest for pictures that the model, or a step, has no place for."""
        for shown in (each.shown for each in request.inserted if each.shown is not None):
            if not any(self.config.vector_bytes):
                raise InvalidRequest("this model sees no pictures; leave them out.", param="multi_modal_data")
            if shown.patches > self.config.most_patches:
                raise InvalidRequest(
                    f"a picture has {shown.patches} patches, and a step has room for {self.config.most_patches}; make "
                    "it smaller, or raise max_num_batched_tokens.",
                    param="multi_modal_data",
                )
            side = self.config.view_side
            if side and (other := set(shown.grids) - {(side, side)}):
                rows, columns = other.pop()
                raise InvalidRequest(
                    f"a view of a picture has {rows} x {columns} patches, and the model's have {side} x {side}; leave "
                    "out the settings of sizes.",
                    param="mm_processor_kwargs",
                )
        if request.params.guidance_scale != 1 and request.inserted:
            raise InvalidRequest(
                "guidance_scale is not for prompts with pictures; leave it out.", param="guidance_scale"
            )

    def _check_together(self, request: Request) -> None:
        """Raise InvalidRequest for tokens that see each other both ways and do not fit a step."""
        most, prompt = self.config.most_together, self.config.both_ways == "prompt"
        for first, end in runs_of(request, self.config.both_ways):
            if end - first > most:
                raise InvalidRequest(
                    f"{'the prompt' if prompt else 'a picture'} has {end - first} tokens, which must run in one step, "
                    f"and a step has room for {most}; {'shorten it' if prompt else 'make it smaller'}, or raise "
                    "max_num_batched_tokens.",
                    param="prompt" if prompt else "multi_modal_data",
                )
        if prompt and request.params.guidance_scale != 1:
            raise InvalidRequest("guidance_scale is not for this model; leave it out.", param="guidance_scale")

    def _check_crossed(self, request: Request) -> int:
        """Return the places of the keys of a request's pictures, if layers of cross attention see them. Raise
        InvalidRequest for more than there may be."""
        keys = picture_keys(request.inserted, self.layout.block_size)
        places, runs = (keys[-1].end, keys[-1].run + 1) if keys else (0, 0)
        if len(keys) > MOST_PICTURES or runs > MOST_RUNS or places > self.config.crosses:
            raise InvalidRequest(
                f"the prompt has {len(keys)} pictures in {runs} places, whose {places} keys are too many: there may be "
                f"{MOST_PICTURES} pictures in {MOST_RUNS} places, with {self.config.crosses} keys; show fewer.",
                param="multi_modal_data",
            )
        return places

    def _check_encoded(self, request: Request) -> None:
        """Raise InvalidRequest for an encoder input that the model, or a step, has no place for."""
        encoded, most, params = request.encoder_ids, self.config.encodes, request.params
        if bool(encoded) is not bool(most):
            wrong = "the prompt is empty; give at least one token" if most else "this model has no encoder input"
            raise InvalidRequest(f"{wrong}.", param="prompt")
        if not most:
            return
        self._check_ids(encoded, "prompt")
        if self.config.hears is not (request.sound is not None):
            wrong = "reads sounds; give multi_modal_data with audio" if self.config.hears else "reads no sounds"
            raise InvalidRequest(f"the encoder of this model {wrong}.", param="prompt")
        if len(encoded) > most or (self.config.hears and len(encoded) < most):
            raise InvalidRequest(
                f"the prompt has {len(encoded)} tokens and the encoder takes {most} at most; shorten it.",
                param="prompt",
            )
        for param, asked in (
            ("guidance_scale", params.guidance_scale != 1),
            ("prompt_embeds", request.embeds is not None),
            ("prompt_logprobs", params.prompt_logprobs is not None),
        ):
            if asked:
                raise InvalidRequest(f"{param} is not for models with an encoder; leave it out.", param=param)

    def _check_pooled(self, request: Request) -> None:
        length, most = len(request.prompt_token_ids), self.config.max_num_batched_tokens
        self._check_ids(request.prompt_token_ids, "prompt")
        if request.inserted:
            check_inserted(request)
            self._check_pictures(request)
        if length > self.config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {length} tokens and the model takes {self.config.max_model_len}; shorten it, or set "
                "truncate_prompt_tokens.",
                param="input",
            )
        if request.whole and length > most:
            raise InvalidRequest(
                f"the prompt has {length} tokens, which must run in one step, and a step has room for {most}; shorten "
                "it, or raise max_num_batched_tokens.",
                param="input",
            )
        if self.layout.pages_needed(length, most) > self.layout.num_pages - 1:
            raise InvalidRequest(
                f"the prompt has {length} tokens, more than the KV cache can ever hold; shorten it, or give the cache "
                "more memory (kv_cache_memory).",
                param="input",
            )

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        limit = self.config.max_model_len
        self._check_ids(prompt, param)
        if len(prompt) >= limit:
            name = param.replace("_", " ")
            raise InvalidRequest(
                f"the {name} has {len(prompt)} tokens and the context holds {limit} including the output; shorten it.",
                param=param,
            )

    def _check_ids(self, prompt: Sequence[int], param: str) -> None:
        vocab_size = self._vocab_size
        name = param.replace("_", " ")
        if not prompt:
            raise InvalidRequest(f"the {name} is empty; give at least one token.", param=param)
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < vocab_size)
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1}).", param=param)


def lost_device(why: str) -> DeviceLost:
    return DeviceLost(f"the device does no work any more ({why}); start a new process.")


def check_inserted(request: Request) -> None:
    """Raise ContractViolation for vectors that lie outside of the prompt, or over each other. The reader of pictures
    makes these, and no client does."""
    end = 0
    for each in request.inserted:
        if each.start < end or each.count < 1 or request.embeds is not None:
            raise ContractViolation(f"vectors are inserted from token {each.start} on, where others end at {end}.")
        end = each.end
    if end > len(request.prompt_token_ids):
        raise ContractViolation(f"vectors are inserted up to token {end} of {len(request.prompt_token_ids)}.")
