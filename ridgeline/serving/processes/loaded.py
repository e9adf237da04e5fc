"""The model that an engine's process has loaded. It may give its memory back for a while, and be loaded again.

At level 1 the engine stays, and its worker's memory goes. At level 2 the engine goes too: another one takes its place,
and the requests that wait for it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.assembly import Assembly, assemble
from ridgeline.assembly.draft import naming_draft
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.embeds import embeds_width, media_widths
from ridgeline.core.plan.request import Request, RequestStats
from ridgeline.core.plan.sleep import KINDS, Kind
from ridgeline.core.plan.worker import WorkerFigures
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.perf.footprint import parameters
from ridgeline.serving.observed.counted import Counted
from ridgeline.serving.processes.adapters import EngineAdapters
from ridgeline.serving.processes.turn import Turn
from ridgeline.transport.messages import EngineFacts, Pause, Reload, Sleep
from ridgeline.weights.loader import described, resolve_model

logger = logging.getLogger(__name__)

TURN_WAIT = 1.0  # seconds for another model's engine to leave the devices


class Loaded:
    """An engine, its worker, and how much of them is there.

    asleep: the level; 0: the engine is awake.
    complete: no memory was given back that has not been asked for again.
    adapters: those that are loaded with the model.
    no_room: requests that the engine which was loaded last cannot run, and why, until they have been reported.
    """

    def __init__(
        self,
        assembly: Assembly,
        config: LLMConfig,
        served_name: str,
        life: int,
        turn: Turn,
        on_finish: Callable[[Request, RequestStats], None],
        adapters: EngineAdapters,
    ) -> None:
        self.adapters = adapters
        self._config, self._turn, self._on_finish = naming_draft(config, assembly.folder), turn, on_finish
        self.asleep = 0
        self._missing = set[Kind]()
        self.no_room: list[tuple[str, InvalidRequest]] = []
        self._told = WorkerFigures()  # what the worker last told of itself
        self._before: Counted | None = None  # by engines that were here earlier
        self._settle_in(assembly, served_name, life)

    @property
    def complete(self) -> bool:
        return not self.asleep and not self._missing

    def shutdown(self) -> None:
        if self.asleep < 2:
            self.engine.shutdown()

    def go_on(self) -> None:
        """Let the engine step again."""
        self._missing = set()
        self.engine.resume()

    def told(self) -> Counted:
        """Return the counts of the engine and its worker, on top of those of engines before them. While the worker is
        asleep it cannot be read, and its last counts stand."""
        if not self.asleep:
            self._told = self.worker.figures()
        counted = Counted(self.engine.scheduler.figures(), self.engine.headroom, self._told)
        return counted if self._before is None else counted.after(self._before)

    def check(self, order: Pause) -> None:
        """Raise InvalidConfig or ModelLoadError for an order that cannot be obeyed, if that can be known before it
        affects any request."""
        if isinstance(order, Sleep) and not self.asleep and order.level == 1:
            self.engine.sleeper()
        if isinstance(order, Sleep) and self.asleep == 1 and order.level == 2:
            raise InvalidConfig("the engine sleeps at level 1; wake it up first.")
        if isinstance(order, Reload):
            if self.asleep:
                way = "send it a request, and reload it then" if self._turn.shared else "wake it up first"
                raise InvalidConfig(f"the engine is asleep; {way}.")
            if order.path:
                self._check_folder(order.path)

    def fall_asleep(self, level: int) -> None:
        """Give memory back. The engine must be paused, with no step in flight. Raise InvalidConfig if it cannot be."""
        if self.asleep == 2:
            return
        began = time.monotonic()
        self.told()  # while there is an engine to ask
        if level == 1:
            self.engine.sleep()  # what a part of it was woken up for, too
        else:
            self.engine.scheduler.untouched()
        self.asleep, self._missing = level, set(KINDS)
        if level == 2:
            self.engine.shutdown()
        self._turn.give()
        logger.info("the engine sleeps (level %d), after %.2f s", level, time.monotonic() - began)

    def wake(self, kinds: Sequence[Kind]) -> None:
        """Bring memory of these kinds back; at level 2 the whole model is loaded. Raise InvalidConfig or ModelLoadError
        if that cannot be."""
        began = time.monotonic()
        if self.asleep and not self._turn.take(TURN_WAIT):
            self._turn.give()
            raise InvalidConfig("another model has the devices; let it sleep first.")
        try:
            if self.asleep == 2:
                self._load(self._folder)
            elif self.asleep:
                self.engine.wake(kinds)
                self.asleep = int(self.engine.asleep)
        except Exception:
            if self.asleep:
                self._turn.give()
            raise
        self._missing -= set(kinds)
        logger.info("the engine woke up after %.2f s", time.monotonic() - began)

    def reload(self, folder: str) -> None:
        """Read the weights again, from another folder of the same model or the same one. Raise InvalidConfig or
        ModelLoadError; if reading fails, the old weights are read again."""
        self.engine.scheduler.untouched()
        self.told()  # while there is an engine to ask
        self.asleep = 2  # until a model is there again
        self.engine.shutdown()
        try:
            self._load(folder or self._folder)
        except Exception:
            if folder:
                self._load(self._folder)
            raise
        finally:
            if self.asleep:
                self._turn.give()
        logger.info("the weights of %s are there", self._folder)

    def _check_folder(self, folder: str) -> None:
        if not os.path.isdir(folder):
            raise InvalidConfig(f"there is no folder {folder} on the server.")
        config = self._config
        found = described(resolve_model(folder), config)
        if found.spec != self._model.spec:
            raise InvalidConfig(f"{folder} is another model than the one that is served; start a server for it.")

    def _load(self, folder: str) -> None:
        """Load a model in place of the one that was shut down. Requests have no tokens yet, and move, except for those
        that there is no more room for."""
        before, requests = self.engine, self.engine.scheduler.untouched()
        assembly = assemble(dataclasses.replace(self._config, model=folder), interactive=True)
        self._before = self.told()
        self._settle_in(assembly, self.facts.model, self.facts.life)
        self.engine.pause()
        self.asleep = 0
        for request in requests:
            try:
                self.engine.add(request)
            except InvalidRequest as error:
                before.abort(request.id)
                self.no_room.append((request.id, error))

    def _settle_in(self, assembly: Assembly, served_name: str, life: int) -> None:
        self._folder, self._model = str(assembly.folder), assembly.model
        self.engine, self.worker = assembly.engine, assembly.worker
        self.engine.on_finish(self._on_finish)
        self.facts = facts_of(assembly, self._config, served_name, life)
        self.adapters.load_all(self.worker, self.facts.model)
        self.list_adapters()

    def name_weights(self, version: str) -> None:
        """Let the facts name the weights that there are."""
        self.facts = msgspec.structs.replace(self.facts, weight_version=version)

    def list_adapters(self) -> None:
        """Let the facts name the adapters that there are."""
        self.facts = msgspec.structs.replace(self.facts, adapters=self.adapters.listed)


def facts_of(assembly: Assembly, options: LLMConfig, served_name: str, life: int) -> EngineFacts:
    """Return the facts that API servers get."""
    config, layout, model = assembly.engine.config, assembly.engine.layout, assembly.model
    return EngineFacts(
        process_id=os.getpid(),
        life=life,
        model=served_name,
        folder=str(assembly.folder),
        max_model_len=config.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_ids=list(model.eos_token_ids),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=layout.block_size,
        num_pages=layout.num_pages - 1,
        cache_tokens=assembly.memory.longest,
        dtype=assembly.dtype,
        device=str(assembly.device),
        enable_prefix_caching=config.enable_prefix_caching,
        session_ttl=options.session_ttl,
        cache_dtype=",".join(layout.kv_dtypes),
        max_logprobs=options.max_logprobs,
        embeds_width=embeds_width(options.enable_prompt_embeds, model.spec),
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=assembly.memory.kv_cache,
        kv_cache_tokens=assembly.memory.tokens,
        pooling=model.spec.pooling,
        encodes=config.encodes,
        decoder_start=model.spec.decoder_start,
        stem=None if model.spec.encoder is None else model.spec.encoder.stem,
        architecture=model.spec.architecture,
        parameters=parameters(model.spec).total,
        layers=len(model.spec.layers),
        width=model.spec.hidden_size,
        precision=assembly.precision.name,
        weight_bytes=assembly.memory.weights,
        ranks=options.ranks,
        modalities=_modalities(model.spec),
        media_widths=media_widths(options.enable_mm_embeds, model.spec),
    )


def _modalities(spec: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of media that the network takes."""
    return *(("image",) if spec.tower is not None else ()), *(("audio",) if spec.listener is not None else ())
