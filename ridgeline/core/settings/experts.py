"""Settings of a mixture's experts: their places, and the times at which they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import AtLeast, Named, Settings
from ridgeline.core.settings.rebalancing import Rebalancing, read_eplb


@dataclass(frozen=True, kw_only=True)
class ExpertSettings(Settings):
    """The places of a mixture's experts.

    enable_expert_parallel: these devices divide the experts of a mixture between them, and no expert's matrices.
    moe_expert_cache_size: of how many experts of a layer the device holds the matrices; those of all lie in the host's
        memory. 0: all are on the device.
    num_redundant_experts: so many further copies of experts lie on the ranks that divide them, of those with most
        tokens.
    init_expert_location: a file with the tokens that every expert got in some run, by which experts are placed.
    enable_eplb: experts and their copies move between ranks while these run, to where the newest load wants them.
    eplb_config: how that is done, as in {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 8}: after
        every `step_interval` steps, by the tokens of the newest `window_size`.
    """

    enable_expert_parallel: bool = False
    moe_expert_cache_size: Annotated[int, AtLeast(0)] = 0
    num_redundant_experts: Annotated[int, AtLeast(0)] = 0
    init_expert_location: Annotated[str | Path | None, Named("the name of a file")] = None
    enable_eplb: bool = False
    eplb_config: Mapping[str, object] | None = None

    def take_redundant(self) -> None:
        """Take the number that `eplb_config` may have."""
        _, redundant = read_eplb(self.eplb_config)
        if redundant is None:
            return
        if self.num_redundant_experts not in (0, redundant):
            raise InvalidConfig(
                f"num_redundant_experts is {self.num_redundant_experts}, and {redundant} in eplb_config; leave one of "
                "them out."
            )
        object.__setattr__(self, "num_redundant_experts", redundant)

    @property
    def rebalancing(self) -> Rebalancing | None:
        """The times at which experts change ranks, or None if they stay where they are."""
        return read_eplb(self.eplb_config)[0] if self.enable_eplb else None
