"""The memory of a device, and what an engine caches there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import AtLeast, Named, Settings
from ridgeline.core.settings.host_tier import Preempted
from ridgeline.core.settings.kv_events import KVEvents, read_kv_events
from ridgeline.kernels.base.kv_format import kv_format

# Tokens per cache block by default. Kernels read larger blocks faster (docs/log.md: pages of 64 gain about 10 % over
# pages of 16 in prefill). Smaller blocks match prefixes and bound requests more finely.
DEFAULT_BLOCK_SIZE = {"cuda": 64, "cpu": 16}
MOST_GIB = 1 << 40  # of the host's memory: more than there is anywhere


class WeightsWanted(NamedTuple):
    """The weights that are to wait in the host's memory.

    gib: of them. group: layers of a group, and those of them that wait; (0, _): as many as have so many GiB. ahead:
    layers that are copied ahead. names: parts of the names of weights in the files that wait alone; none: all matrices.
    """

    gib: float
    group: tuple[int, int] = (0, 1)
    ahead: int = 1
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CacheSettings(Settings):
    """The memory of the device, and what is cached in it.

    kv_offloading_size: GiB of the host's memory, for all ranks of an engine together, for blocks that the device's
        cache has no room for. They come back where that is faster than running their tokens again. None or 0: there is
        none.
    cpu_offload_gb: GiB of the weights of each device's layers that wait in the host's memory and are copied to the
        device in every step, for a model that is larger than it.
    offload_group_size: layers in groups of so many, of each of which the last ones wait in the host's memory, in place
        of `cpu_offload_gb`. 0: that says how many wait.
    offload_num_in_group: how many of each group.
    offload_prefetch_step: the layers that are copied ahead of the one that is computed.
    offload_params: parts of the names of weights in the files, as "mlp.experts" or "gate_up_proj": of these layers
        these wait alone. None: all matrices do.
    offload_backend: "auto", "prefetch" or "uva", as vLLM has them; they do the same.
    kv_offloading_backend: "native", which is the only one.
    preemption_mode: what becomes of a preempted request's blocks: "auto", "recompute" or "swap"
        (`HostTierSettings.preempted`). The last one needs kv_offloading_size.
    kv_disk: the directory on a local disk below the host's memory, which servers of one host may share; a server that
        starts again finds its cache there. None: there is none.
    kv_disk_size: GiB of all files in that directory.
    kv_disk_eviction: the block that goes first there: "lru" (used longest ago), "lfu" (used least) or "cost" (spares
        least time for its bytes).
    kv_disk_ttl: seconds after which a block is deleted there. 0: never.
    kv_disk_tenant_size: GiB there of one tenant (cache salt). None: as much as there is.
    session_ttl: the most seconds for which what a request leaves is kept ahead of other idle blocks, where it asks for
        that (`prompt_cache_key`, `cache_control`, `prompt_cache_ttl`). 0: such hints are ignored.
    session_share: the share of the cache's memory, on the device and in the host's, that one client's sessions keep.
    enable_sleep_mode: a GPU's memory can be given back, and the weights kept in the host's, while the engine sleeps.
    sleep_mode_offload_cudagraph: the memory of CUDA graphs goes to the host with the weights.
    gpu_memory_utilization: the share of the device's memory that the engine may use in all.
    kv_cache_memory: bytes for the KV cache on each device, in place of that share.
    encoder_cache_bytes: bytes of vectors of pictures and sounds that each device keeps, beside those that a step uses.
        None: those of four steps' tokens.
    block_size: tokens per cache block (64 on a GPU, otherwise 16).
    kv_cache_dtype: how keys and values are cached: "auto" as the activations (or as the checkpoint says), "bfloat16",
        or in 8 bits with a scale for each token and key head: "fp8" (the same as "fp8_e4m3"), "fp8_e5m2" or "int8".
        Latents are held so too, with a scale for each token; of models with an indexer its keys are, and latents are
        not.
    state_cache_share: of a model with states of constant size (recurrent layers), the share of the cache's pages that
        states kept for later requests may take, beside keys and values. Those of running requests do not count.
    state_checkpoint_interval: the tokens after which a long prompt or output leaves such a state behind, besides at its
        end and where prompts part. The default follows from the bytes of a state, beside those of keys and values.
    kv_events_config: where changes of the prefix cache are published, in vLLM's form, as in
        {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"} (`KVEvents`).
    """

    gpu_memory_utilization: float = 0.9
    kv_cache_memory: Annotated[int | None, AtLeast(1)] = None
    encoder_cache_bytes: Annotated[int | None, AtLeast(0)] = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    state_cache_share: float = 0.5
    state_checkpoint_interval: Annotated[int | None, AtLeast(1)] = None
    cpu_offload_gb: Annotated[float, AtLeast(0)] = 0.0
    offload_group_size: Annotated[int, AtLeast(0)] = 0
    offload_num_in_group: Annotated[int, AtLeast(1)] = 1
    offload_prefetch_step: Annotated[int, AtLeast(1)] = 1
    offload_params: tuple[str, ...] = ()
    offload_backend: Literal["auto", "prefetch", "uva"] = "auto"
    kv_offloading_size: Annotated[float | None, AtLeast(0)] = None
    kv_offloading_backend: str = "native"
    preemption_mode: Preempted = "auto"
    kv_disk: Annotated[str | Path | None, Named("a path")] = None
    kv_disk_size: Annotated[float, AtLeast(0)] = 64.0
    kv_disk_eviction: str = "lru"
    kv_disk_ttl: Annotated[float, AtLeast(0)] = 0.0
    kv_disk_tenant_size: Annotated[float | None, AtLeast(0)] = None
    session_ttl: Annotated[float, AtLeast(0)] = 3600.0
    session_share: float = 0.25
    enable_sleep_mode: bool = False
    sleep_mode_offload_cudagraph: bool = False
    kv_events_config: Mapping[str, object] | None = None

    @property
    def kv_events(self) -> KVEvents | None:
        """The addresses at which changes of the prefix cache are published, if they are."""
        return read_kv_events(self.kv_events_config)

    def check(self) -> None:
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise InvalidConfig("kv_events_config tells of the prefix cache; leave it out, or enable_prefix_caching.")
        kv_format(self.kv_cache_dtype)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfig(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}."
            )
        if not 0 <= self.state_cache_share <= 1:
            raise InvalidConfig(f"state_cache_share must be from 0 to 1, got {self.state_cache_share!r}.")
        if not 0 < self.session_share <= 1:
            raise InvalidConfig(f"session_share must be above 0 and at most 1, got {self.session_share!r}.")
        if self.offload_group_size and self.cpu_offload_gb:
            raise InvalidConfig(
                "offload_group_size and cpu_offload_gb both say which layers wait; leave one of them out."
            )
        if self.offload_group_size and self.offload_num_in_group > self.offload_group_size:
            raise InvalidConfig(
                f"offload_num_in_group is {self.offload_num_in_group}, and a group has offload_group_size "
                f"{self.offload_group_size} layers; lower it."
            )
        if self.preemption_mode == "swap" and not self.kv_offloading_size:
            raise InvalidConfig(
                "preemption_mode swap moves blocks to the host's memory, and there is none for them; set "
                "kv_offloading_size, in GiB."
            )
        if self.kv_offloading_backend != "native":
            raise InvalidConfig(f"unknown kv_offloading_backend {self.kv_offloading_backend!r}; use native.")
        if self.kv_disk_eviction not in ("lru", "lfu", "cost"):
            raise InvalidConfig(f"kv_disk_eviction must be lru, lfu or cost, got {self.kv_disk_eviction!r}.")
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise InvalidConfig(f"block_size must be a power of two, got {self.block_size!r}.")

    @property
    def weights_below(self) -> WeightsWanted | None:
        """The weights that are to wait in the host's memory, if some are."""
        if not self.cpu_offload_gb and not self.offload_group_size:
            return None
        group = (self.offload_group_size, self.offload_num_in_group)
        return WeightsWanted(self.cpu_offload_gb, group, self.offload_prefetch_step, tuple(self.offload_params))

    @property
    def host_bytes(self) -> int:
        """The bytes of the host's memory that keep blocks, of all ranks together."""
        return int(min(self.kv_offloading_size or 0, MOST_GIB) * (1 << 30))
