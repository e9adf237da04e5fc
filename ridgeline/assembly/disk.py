"""The disk below the cache's tier in the host's memory: the store that an engine is given."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import ridgeline.version
from ridgeline.core.plan.worker import KeepsBelow
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.together import SIZES
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.engine import Engine
from ridgeline.tiers.disk import DiskTier
from ridgeline.tiers.options import DiskOptions
from ridgeline.weights.folder import fingerprint

NUMBERS = (  # settings that change what a block holds, beside the layout
    *("quantization", "hf_overrides", "model_impl", "runner", "convert", "load_format", "kernels", "deterministic"),
    "speculative_config",
)
DIVISION = (*SIZES, "pipeline_layer_partition", "enable_expert_parallel")  # settings that say what a rank has of it
GIB = 1 << 30


def keep_on_disk(
    config: LLMConfig, engine: Engine, folder: Path, device_type: str, memory: KeepsBelow | None = None
) -> None:
    """Put a directory on a disk below the engine's tier in the host's memory, if the settings name one. Raise
    InvalidConfig if it cannot be used.

    folder: that the weights were read from. What a draft model or head leaves there changes no token, so theirs does
        not count.
    memory: lets others read and write the host's blocks; None: the engine's worker does.
    """
    if config.kv_disk is None or engine.scheduler.cache.tier is None:
        return
    quota = config.kv_disk_tenant_size
    options = DiskOptions(
        eviction=config.kv_disk_eviction,
        ttl=config.kv_disk_ttl,
        tenant_bytes=None if quota is None else int(quota * GIB),
    )
    identity = identity_of(config, engine.layout, folder, device_type)
    engine.keep_on_disk(DiskTier(Path(config.kv_disk), identity, int(config.kv_disk_size * GIB), options), memory)


def identity_of(config: LLMConfig, layout: CacheLayout, folder: Path, device_type: str) -> bytes:
    """Return bytes that differ where blocks of the same tokens hold other bytes: for other weights, types, layouts,
    devices or versions."""
    facts: list[object] = [ridgeline.version.__version__, device_type, fingerprint(folder)]
    facts += [(name, str(getattr(config, name))) for name in NUMBERS]
    facts += [(name, getattr(config, name)) for name in DIVISION]
    facts.append(config.seed if config.load_format == "dummy" else None)
    facts += [layout.block_size, layout.dtype, layout.tokens_held, layout.ranks, *layout.groups]
    return blake2b(repr(facts).encode(), digest_size=32).digest()
