"""The settings to start with for a load: the fewest replicas that keep its bounds, and what keeps them best.

Each trial is a simulated run of the same requests. Replicas double until some settings keep the bounds for `SHARE` of
the requests; then the fewest between are looked for. Settings change one after the other from a server's own, and a
change is kept only where it brings more requests within the bounds, or as many with a clearly shorter first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.figures import FleetFigures
from ridgeline.simulation.setup import Settings

SHARE = 0.99  # of the requests, that must be within the bounds
HOPELESS = 0.5  # below, no setting makes up for more replicas
BETTER, SHORTER = 0.002, 0.9  # a share that is larger by so much; a first token that takes at most so much of the other

Simulate = Callable[[Settings, int], FleetFigures]


@dataclass(frozen=True)
class SettingTrial:
    """A run. changed: the setting that was tried, "" for none. share: of the requests within the bounds."""

    settings: Settings
    replicas: int
    changed: str
    figures: FleetFigures

    @property
    def share(self) -> float:
        return (self.figures.goodput or 0.0) * self.figures.duration / max(1, self.figures.requests)

    def beats(self, other: SettingTrial) -> bool:
        if abs(self.share - other.share) > BETTER:
            return self.share > other.share
        return self.figures.ttft.p99 < SHORTER * other.figures.ttft.p99


class SettingSearch:
    """simulate: runs the load with some settings on so many replicas. choices: by the name of a setting, other values.
    most: replicas at most. trials: all runs, in order."""

    def __init__(self, simulate: Simulate, choices: Mapping[str, Sequence[Any]], most: int) -> None:
        self._simulate, self._choices, self._most = simulate, choices, most
        self.trials: list[SettingTrial] = []

    def best(self, start: Settings) -> SettingTrial:
        """Return the trial to start with: one that keeps the bounds on the fewest replicas, or else the one that does
        best on the most."""
        replicas, below = 1, 0
        while True:
            found = self._try(start, replicas)
            if found.share >= HOPELESS or replicas >= self._most:
                found = self._tuned(found)
            if found.share >= SHARE or replicas >= self._most:
                break
            below, replicas = replicas, min(2 * replicas, self._most)
        while found.share >= SHARE and found.replicas - below > 1:
            fewer = self._try(found.settings, (found.replicas + below) // 2)
            if fewer.share >= SHARE:
                found = fewer
            else:
                below = fewer.replicas
        return found

    def _tuned(self, found: SettingTrial) -> SettingTrial:
        for name, values in self._choices.items():
            for value in values:
                if getattr(found.settings, name) == value:
                    continue
                try:
                    other = self._try(replace(found.settings, **{name: value}), found.replicas, f"{name}={value}")
                except InvalidConfig:  # the model does not fit with it
                    continue
                found = other if other.beats(found) else found
        return found

    def _try(self, settings: Settings, replicas: int, changed: str = "") -> SettingTrial:
        self.trials.append(SettingTrial(settings, replicas, changed, self._simulate(settings, replicas)))
        return self.trials[-1]
