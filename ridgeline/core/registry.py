"""Lazy registries: a name maps to "module:attribute", which is imported only when it is asked for.

Adding a model, a kernel or a policy takes one file and one line. Importing a registry costs nothing.

An installed package can bring lines too, as entry points (plugins). The group is `ridgeline.` and the registry's kind:

    [project.entry-points."ridgeline.scheduling_policy"]
    shortest = "my_package.policies:Shortest"
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ridgeline.core.errors import InvalidConfig

PREFIX = "ridgeline."  # of the groups of entry points


class Registry:
    """A table of names. Example: `Registry("scheduling policy", {"fcfs":
    "ridgeline.engine.policy.fcfs:FCFS"})["fcfs"]`.

    Iterating it yields its own names. A plugin's name is looked for where there is no line of that name. Its code is
    imported when the name is asked for, not before.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        if isinstance(name, str) and name in self._entries:
            module, _, attribute = self._entries[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        found = self._plugins(name)
        if not found:
            known = ", ".join(sorted({*self._entries, *(each.name for each in self._plugins())}))
            raise InvalidConfig(f"unknown {self._kind} {name!r}; known: {known}.")
        if len(found) > 1:
            several = " and ".join(sorted(map(origin, found)))
            raise InvalidConfig(f"the {self._kind} {name!r} is in several plugins: {several}; uninstall all but one.")
        return _loaded(self._kind, found[0])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._entries or bool(self._plugins(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, target: str) -> None:
        """Add `name` → "module:attribute", for extensions that live outside this package."""
        self._entries[name] = target

    def added(self) -> dict[str, str]:
        """Return name → package of the plugins that bring further lines."""
        return {each.name: origin(each) for each in self._plugins() if each.name not in self._entries}

    def _plugins(self, name: str | None = None) -> list[EntryPoint]:
        """Return the plugins of this kind, or those of one name."""
        group = group_of(self._kind)
        return [each for each in plugins() if each.group == group and name in (None, each.name)]


def group_of(kind: str) -> str:
    """Return the group of entry points that bring lines of a registry."""
    return PREFIX + kind.replace(" ", "_").replace("-", "_")


@cache
def plugins() -> tuple[EntryPoint, ...]:
    """Return the plugins of all kinds that are installed, each once. Their code is not imported."""
    groups = [group for group in entry_points().groups if group.startswith(PREFIX)]
    found = {(each.group, each.name, each.value): each for group in groups for each in entry_points(group=group)}
    return tuple(found[key] for key in sorted(found))


def listed() -> list[str]:
    """Return a line for each plugin that is installed."""
    return [f"{each.group} {each.name!r} of {origin(each)} ({each.value})" for each in plugins()]


def origin(plugin: EntryPoint) -> str:
    """Return the package that brings a plugin, with its version."""
    package = plugin.dist
    return f"{package.name} {package.version}" if package is not None else plugin.value


def _loaded(kind: str, plugin: EntryPoint) -> Any:
    """Return a plugin's object. Raise InvalidConfig if that cannot be had, whatever its module raises."""
    try:
        return plugin.load()
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        whose = f"the {kind} {plugin.name!r} of the package {origin(plugin)}"
        raise InvalidConfig(
            f"{whose} cannot be loaded from {plugin.value} ({said}); repair or uninstall the package."
        ) from error
