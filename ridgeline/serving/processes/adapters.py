"""The adapters that an engine serves: they are loaded with the model, and then by orders of API servers.

Another thread reads an adapter, so steps go on meanwhile. One that is unloaded takes no further requests, and is
forgotten as soon as those that are here have ended. A file beside the engine's socket holds the list, from which an
engine that replaces this one begins.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from ridgeline.core.errors import InvalidConfig, InvalidRequest, RidgelineError
from ridgeline.core.plan.adapters import AdapterFacts, HoldsAdapters
from ridgeline.core.plan.request import Request
from ridgeline.core.settings.adapters import TENSORS
from ridgeline.engine.protocol import HoldsRequests
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.transport.messages import AdapterAnswer, LoadAdapter, ServedAdapter, UnloadAdapter

logger = logging.getLogger(__name__)

MOST_READING = 16  # orders that wait for their adapter to be read
MOST_TOLD = 64  # adapters whose requests are counted by name
OTHERS = "others"  # stands for the adapters beyond that


class EngineAdapters:
    """The adapters of one engine, and how many requests are here with each."""

    def __init__(self, settings: EngineSettings) -> None:
        self._most, self._most_bytes = settings.most_adapters, settings.most_adapter_bytes
        self._places = int(settings.options.get("max_loras", 1)) if settings.options.get("enable_lora") else 0
        self._path = Path(f"{settings.socket}.adapters")
        self._served: dict[str, ServedAdapter] = {}
        given = [
            ServedAdapter(name=each.name, number=number, key="", folder=each.path, parent=each.parent)
            for number, each in enumerate(settings.adapters, 1)
        ]
        self._given = {(each.name, each.number) for each in given}
        kept = self._read_list() if settings.life > 1 else None
        self._kept: list[ServedAdapter] | None = given if kept is None else kept  # until they are loaded
        self._retired: dict[int, ServedAdapter] = {}  # unloaded, and not forgotten yet
        self._requests: dict[str, ServedAdapter] = {}
        self._open = Counter[int]()  # number → requests that are here
        self._begun = set[str]()  # requests that a step has run
        self._counts = Counter[str]()  # name → requests so far
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading: deque[tuple[bytes, LoadAdapter, object, Future[AdapterFacts]]] = deque()
        self._parent = ""

    @property
    def listed(self) -> list[ServedAdapter]:
        return list(self._served.values())

    @property
    def pending(self) -> bool:
        """True while an adapter is read."""
        return bool(self._reading)

    def load_all(self, worker: object, parent: str) -> None:
        """Load all adapters that there are to a model that was just loaded. Raise InvalidConfig or ModelLoadError for
        one that the server was started with and that cannot run; others are left out."""
        self._parent = parent
        wanted, self._kept, self._served = self.listed if self._kept is None else self._kept, None, {}
        for each in wanted:
            try:
                self._served[each.name] = self._loaded(worker, each)
            except RidgelineError as error:
                if (each.name, each.number) in self._given:
                    raise
                logger.warning("adapter %s is not served any more: %s", each.name, error)
        for each in self._retired.values():
            with suppress(RidgelineError):  # its requests end with the reason
                self._loaded(worker, each)

    def _loaded(self, worker: object, each: ServedAdapter) -> ServedAdapter:
        if not isinstance(worker, HoldsAdapters):
            raise InvalidConfig("adapters do not run on such ranks yet; leave lora_modules out.")
        return self._told(each, worker.add_adapter(each.number, Path(each.folder)))

    def _told(self, each: ServedAdapter, facts: AdapterFacts) -> ServedAdapter:
        logger.info("adapter %s has rank %d and %.1f MB", each.name, facts.rank, facts.num_bytes / 1e6)
        parent = each.parent or self._parent
        return msgspec.structs.replace(each, key=facts.key, parent=parent, num_bytes=facts.num_bytes)

    # ---- orders -----------------------------------------------------------------------------------------------

    def begin(self, connection: bytes, order: LoadAdapter, worker: object) -> str:
        """Begin to read an adapter, which `done` tells the end of. Return the reason why it cannot be, or nothing."""
        if not isinstance(worker, HoldsAdapters):
            return "adapters do not run on such ranks yet."
        if len(self._reading) >= MOST_READING:
            return f"{MOST_READING} adapters are being read; try again soon."
        if error := self._refusal(order):
            return error
        reading = self._reader.submit(worker.add_adapter, order.number, Path(order.folder))
        self._reading.append((connection, order, worker, reading))
        return ""

    def done(self, worker: object) -> Iterator[tuple[bytes, AdapterAnswer]]:
        """Yield each order whose adapter was read, with its answer, once the list has it or it cannot run."""
        while self._reading and self._reading[0][-1].done():
            connection, order, whose, reading = self._reading.popleft()
            yield connection, AdapterAnswer(id=order.id, error=self._take_in(order, worker, whose, reading))

    def _take_in(self, order: LoadAdapter, worker: object, whose: object, reading: Future[AdapterFacts]) -> str:
        try:
            facts = reading.result()
        except RidgelineError as error:
            return str(error)
        except Exception as error:
            logger.warning("the adapter in %s could not be read", order.folder, exc_info=error)
            return f"the adapter could not be read ({type(error).__name__}); the engine's log has more."
        if whose is not worker:
            return "the model was loaded anew meanwhile; load the adapter again."
        if refusal := self._refusal(order, facts.num_bytes):
            assert isinstance(worker, HoldsAdapters)
            worker.remove_adapter(order.number)
            return refusal
        before = self._served.pop(order.name, None)
        if before is not None:
            self._retired[before.number] = before
        parent = before.parent if before is not None else ""
        added = ServedAdapter(name=order.name, number=order.number, key="", folder=order.folder, parent=parent)
        self._served[order.name] = self._told(added, facts)
        self._write_list()
        return ""

    def _refusal(self, order: LoadAdapter, num_bytes: int | None = None) -> str:
        """Return the reason why an adapter cannot join the others, or nothing. num_bytes: of its matrices; None: of
        its file, which has about as many."""
        before = self._served.get(order.name)
        if before is not None and not order.replaces:
            return f"there is an adapter {order.name!r} already; unload it, or set load_inplace to true."
        others = [*(each for each in self._served.values() if each is not before), *self._retired.values()]
        if len(others) >= self._most:
            return f"{len(others)} adapters are loaded, as many as max_served_loras allows; unload one first."
        if num_bytes is None:
            try:
                num_bytes = (Path(order.folder) / TENSORS).stat().st_size
            except OSError:
                num_bytes = 0  # the reader says what is wrong
        if sum(each.num_bytes for each in others) + num_bytes > self._most_bytes:
            return (
                f"the adapter's {num_bytes:,} bytes exceed what the others leave of max_served_lora_bytes "
                f"({self._most_bytes:,}); unload one first."
            )
        return ""

    def unload(self, order: UnloadAdapter) -> AdapterAnswer:
        """Take an adapter off the list."""
        found = self._served.get(order.name)
        if found is None or order.number not in (0, found.number):
            said = f"there is no adapter {order.name[:80]!r} here; GET /v1/models lists them."
            return AdapterAnswer(id=order.id, error=said, unknown=True)
        del self._served[order.name]
        self._retired[found.number] = found
        self._counts.pop(order.name, None)
        self._write_list()
        return AdapterAnswer(id=order.id)

    def forget(self, scheduler: HoldsRequests, worker: object) -> None:
        """Forget the unloaded adapters with which no request is here any more."""
        for number in [number for number in self._retired if not self._open[number]]:
            if scheduler.forget_adapter(number):
                del self._retired[number]
                if isinstance(worker, HoldsAdapters):
                    worker.remove_adapter(number)

    # ---- requests ---------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for a request whose adapter is not served any more."""
        if request.adapter and all(each.number != request.adapter for each in self._served.values()):
            raise InvalidRequest("the adapter was unloaded meanwhile; name another model.", param="model")

    def enter(self, request: Request) -> None:
        """Count a request in, which `check` has passed."""
        if request.adapter:
            found = next(each for each in self._served.values() if each.number == request.adapter)
            self._requests[request.id] = found
            self._open[found.number] += 1
            name = found.name if found.name in self._counts or len(self._counts) < MOST_TOLD else OTHERS
            self._counts[name] += 1

    def note_begin(self, name: str) -> None:
        """Note that a step runs a request."""
        if name in self._requests:
            self._begun.add(name)

    def leave(self, name: str) -> None:
        """Count a request out, however it ended."""
        if (found := self._requests.pop(name, None)) is not None:
            self._begun.discard(name)
            self._open[found.number] -= 1
            if not self._open[found.number]:
                del self._open[found.number]

    def figures(self) -> dict[str, float]:
        """Return counts for `Stats`: requests so far, and those that run and wait, by adapter."""
        if not self._places:
            return {}
        found = Counter[str]({f"adapter requests: {name}": count for name, count in self._counts.items()})
        found["adapters: places"] = self._places
        for name, adapter in self._requests.items():
            found[f"adapter {'running' if name in self._begun else 'waiting'}: {adapter.name}"] += 1
        return {name: float(count) for name, count in found.items()}

    # ---- the list of an engine that comes after ---------------------------------------------------------------

    def _read_list(self) -> list[ServedAdapter] | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[ServedAdapter])
        except (OSError, msgspec.DecodeError):
            return None

    def _write_list(self) -> None:
        """Write the list in one piece. Without room on the disk, a later engine begins with an older one."""
        new = self._path.with_suffix(".new")
        with suppress(OSError):
            new.write_bytes(msgspec.json.encode(self.listed))
            new.replace(self._path)
