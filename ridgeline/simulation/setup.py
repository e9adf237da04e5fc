"""A model on a device, as a server would set it up: limits of steps, room for the cache, and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ridgeline.core.clock import Clock
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE, MOST_GIB
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.settings.host_tier import HostTierSettings
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.core.settings.steps import DEFAULT_LIMITS, LARGE_GPU, LARGE_STEP
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.host_layout import HostLayout, staging_bytes
from ridgeline.core.specs.model import ModelSpec
from ridgeline.engine.engine import Engine
from ridgeline.engine.itl import choose_itl_target
from ridgeline.engine.policy import POLICIES
from ridgeline.perf.bus import bus_rate
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.planner import Deployment, NoRoom, Plan
from ridgeline.perf.precision import Precision
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.step_time import StepTimes
from ridgeline.simulation.bus import HostBus
from ridgeline.simulation.device import Device
from ridgeline.simulation.disk import DeviceAboveDisk, SimulatedDisk
from ridgeline.simulation.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of each replica. None: what a server would choose.

    objectives: further settings of policies. itl_target: milliseconds, 0 for none. kv_tokens: tokens that the cache
    holds. kv_offloading_size: GiB of the host's memory for blocks that it gives up. kv_disk_size, kv_disk_rate: GiB
    of a disk below that, and its GB/s; kv_disk_shared: all replicas have one, as a central store. utilization:
    share of the device's memory that is used. lag: seconds between a client and the engine, both ways together.
    """

    policy: str = "fcfs"
    objectives: PolicySettings = field(default_factory=PolicySettings)
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    itl_target: float | None = None
    prefix_caching: bool = True
    kv_tokens: int | None = None
    kv_offloading_size: float = 0.0
    kv_disk_size: float = 0.0
    kv_disk_rate: float = 0.7
    kv_disk_shared: bool = False  # one for all replicas
    utilization: float = 0.9
    lag: float = 0.002

    def __post_init__(self) -> None:
        POLICIES[self.policy]  # it raises InvalidConfig for an unknown one
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}.")
        if self.itl_target is not None and not 0 <= self.itl_target < float("inf"):
            raise InvalidConfig(f"itl_target must be a number of milliseconds from 0, got {self.itl_target!r}.")
        if not 0 <= self.kv_offloading_size <= MOST_GIB:
            raise InvalidConfig(
                f"kv_offloading_size must be from 0 to {MOST_GIB:g} GiB, got {self.kv_offloading_size!r}."
            )
        if self.kv_offloading_size and not self.prefix_caching:
            raise InvalidConfig("blocks in the host's memory are found by their prefixes; leave prefix caching on.")
        if not 0 <= self.kv_disk_size <= MOST_GIB or not 0 < self.kv_disk_rate < float("inf"):
            raise InvalidConfig(
                f"kv_disk_size must be from 0 to {MOST_GIB:g} GiB and kv_disk_rate above 0 GB/s, got "
                f"{self.kv_disk_size!r} and {self.kv_disk_rate!r}."
            )
        if self.kv_disk_size and not self.kv_offloading_size:
            raise InvalidConfig("blocks come to the disk by way of the host's memory; set kv_offloading_size.")
        if self.kv_disk_shared and not self.kv_disk_size:
            raise InvalidConfig("replicas share a disk only where there is one; set kv_disk_size.")
        if not 0 <= self.lag < float("inf"):
            raise InvalidConfig(f"lag must be a number of seconds from 0, got {self.lag!r}.")


class Setup:
    """The parts that all replicas of a fleet have in common. config, layout, times: of each.

    Raise InvalidConfig for a model that does not fit, or that a simulation cannot run."""

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        dtype: str | Precision,
        settings: Settings,
        kv_dtype: str | None = None,
    ) -> None:
        if model.pooling is not None:
            raise InvalidConfig("a simulation needs a model that generates; this one pools its prompts.")
        self.model, self.hardware, self.settings = model, hardware, settings
        large = hardware.memory >= LARGE_GPU
        rows = settings.max_num_seqs or DEFAULT_LIMITS["cuda"][0]
        tokens = settings.max_num_batched_tokens or (LARGE_STEP if large else DEFAULT_LIMITS["cuda"][1])
        longest = settings.max_model_len or model.max_position_embeddings
        block_size = DEFAULT_BLOCK_SIZE["cuda"]
        deployment = Deployment(
            model=model,
            hardware=hardware,
            input=1,
            output=1,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=block_size,
            utilization=settings.utilization,
        )
        try:
            plan = Plan(deployment)
        except NoRoom as error:
            smaller = "choose a larger --gpu, or a smaller --dtype or --kv-dtype"
            raise InvalidConfig(f"{error.fact}; a simulated replica is one device: {smaller}.") from None
        layout = CacheLayout(
            groups=model.cache_groups, block_size=block_size, dtype=plan.precision.other_rate, num_pages=2
        )
        pages = int(plan.kv_budget // layout.page_bytes)
        if settings.kv_tokens is not None:
            pages = min(pages, layout.pages_needed(settings.kv_tokens, tokens))
        if settings.max_model_len is None:
            longest = next((n for n in _halves(longest) if layout.pages_needed(n, tokens, n) <= pages), 0)
        if not longest or layout.pages_needed(longest, tokens, longest) > pages:
            raise InvalidConfig(
                f"the cache holds {pages} pages and one request of {longest or 1} tokens needs more; raise --kv-tokens "
                "or lower --max-model-len."
            )
        self.layout = replace(layout, num_pages=1 + pages)
        self._tier: HostTierSettings | None = None
        if settings.kv_offloading_size:
            below = HostLayout.within(self.layout, int(settings.kv_offloading_size * (1 << 30)))
            self._tier = HostTierSettings(
                pages=below.num_pages,
                bytes_per_second=bus_rate(hardware),
                staging_bytes=staging_bytes(layout.groups, layout.dtype, max(tokens, rows)),
            )
            self._block_bytes = below.block_bytes
        limit = Roofline(model, hardware, dtype, kv_dtype)
        self.config = EngineConfig(
            max_model_len=longest,
            max_num_seqs=rows,
            max_num_batched_tokens=max(tokens, rows),
            enable_prefix_caching=settings.prefix_caching,
            scheduling_policy=settings.policy,
            policy=settings.objectives,
            itl_target=choose_itl_target(settings.itl_target, limit, interactive=True),
            cascade=True,
            host_tier=self._tier,
            encodes=min(longest, max(tokens, rows)) if model.encoder is not None else 0,
        )
        self.limit = limit
        self._params: dict[int, SamplingParams] = {}  # at most as many as lengths of contexts
        self.times = StepTimes(model, hardware, dtype, kv_dtype, max_rows=rows, max_tokens=max(tokens, rows))

    def params(self, limit: int) -> SamplingParams:
        """Return the parameters of requests that may write so many tokens."""
        if limit not in self._params:
            self._params[limit] = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True)
        return self._params[limit]

    def disk(self, clock: Clock) -> SimulatedDisk | None:
        """Return the empty disk of a replica, if it has one."""
        settings = self.settings
        if not settings.kv_disk_size:
            return None
        return SimulatedDisk(clock, int(settings.kv_disk_size * (1 << 30)), 1e9 * settings.kv_disk_rate)

    def start(self, clock: Clock, gaps: Tally, slow: float, disk: SimulatedDisk | None = None) -> tuple[Engine, Device]:
        """Return a new engine with an empty cache, above this disk, and its device."""
        tier, bandwidth = self._tier, self.hardware.bandwidth
        bus = None if tier is None else HostBus(tier.bytes_per_second, bandwidth, self._block_bytes)
        kind = Device if disk is None else DeviceAboveDisk
        device = kind(clock, self.times, self.config.max_num_seqs, gaps, slow, bus)
        if isinstance(device, DeviceAboveDisk):
            device.hold(self._block_bytes)
        vocab = self.model.vocab_size
        engine = Engine(self.config, self.layout, device, vocab_size=vocab, cost_model=self.limit, clock=clock)
        engine.without_headroom()
        if disk is not None:
            engine.keep_on_disk(disk)
            below = engine.scheduler.cache.tier
            assert below is not None
            assert below.disk is not None
            below.disk.expect(disk.rate)
        return engine, device


def _halves(longest: int) -> list[int]:
    """Return lengths from the longest down to 1, each half of the one before."""
    return [longest >> n for n in range(longest.bit_length())]
