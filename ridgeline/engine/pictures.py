"""The vectors of pictures and sounds that the worker holds. Where there are too many, the least recently used go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import ShownPictures
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.engine.plan_builder import PlanBuilder


class HeldVectors:
    """The vectors that the worker holds by name, as of the newest plan.

    most: the bytes that it may hold beside those that the newest plan uses.
    vector_bytes: of a picture's vector, and of a sound's.
    patch_cost, pixel_cost: the tokens that cost as much as a patch, and as a pixel that is resized.
    patches: that the tower runs for a picture, whatever its size; 0: as many as the picture has.
    due: some may have to go with the next plan.
    hits, misses: how often a request's picture found its vectors there, and how often it did not.
    """

    def __init__(
        self,
        most: int,
        vector_bytes: tuple[int, int],
        patch_cost: float,
        patches: int = 0,
        pixel_cost: float = 0.0,
    ) -> None:
        self.most, self._patch_cost, self._patches, self._pixel_cost = most, patch_cost, patches, pixel_cost
        self._picture_bytes, self._sound_bytes = vector_bytes
        self._held: OrderedDict[str, int] = OrderedDict()  # name → bytes
        self._total = 0
        self._used: set[str] = set()  # by the plan in the making
        self._dropped: list[str] = []
        self.due = False
        self.hits = self.misses = 0

    def cost(self, shown: ShownPictures | HeardSound) -> int:
        """Return the tokens that cost as much as the tower's work on a picture, and as its way to patches."""
        pixels = shown.num_bytes // 3 if isinstance(shown, ShownPictures) else 0
        return ceil((self._patches or shown.patches) * self._patch_cost + pixels * self._pixel_cost)

    def end(self, inserted: Iterable[Inserted], start: int, stop: int, builder: PlanBuilder) -> int:
        """Return the end of a chunk of these tokens, so that the step has room for the tower's work on the pictures in
        it. The first picture of a step may be larger than that, if nothing else of a prompt runs with it."""
        spent, seen = 0, set[str]()
        for each in inserted:
            if each.end <= start or each.made_of is None or each.name in seen or each.name in self._held:
                continue
            if each.start >= stop:
                break
            before = max(each.start - start, 0)
            alone = not (spent or before or builder.seen_tokens or builder.chunks)
            cost = self.cost(each.made_of)
            if not alone and before + spent + cost > builder.budget:
                return start + before
            spent += cost
            seen.add(each.name)
        return stop

    def placed(self, parts: Iterable[Inserted], builder: PlanBuilder) -> tuple[Inserted, ...]:
        """Return a row's parts with their pictures where the worker does not hold their vectors. Take the tower's work
        from the builder's budget."""
        return tuple(self._placed(each, builder) for each in parts)

    def _placed(self, part: Inserted, builder: PlanBuilder) -> Inserted:
        shown, name = part.made_of, part.name
        if shown is None:
            return part
        self._used.add(name)
        self.due = True
        if name in self._held:
            self._held.move_to_end(name)
            self.hits += part.first == 0
            return replace(part, shown=None, heard=None)
        builder.takes(self.cost(shown))
        each = self._picture_bytes if isinstance(shown, ShownPictures) else self._sound_bytes
        self._held[name] = shown.vectors * each
        self._total += self._held[name]
        self.misses += 1
        return part

    def forgotten(self) -> tuple[str, ...]:
        """Return the names of vectors that the worker lets go before the plan that is complete now."""
        for name in [name for name in self._held if name not in self._used]:
            if self._total <= self.most:
                break
            self._total -= self._held.pop(name)
            self._dropped.append(name)
        self.due = self._total > self.most
        dropped, self._dropped = tuple(name for name in self._dropped if name not in self._held), []
        self._used.clear()
        return dropped

    def forget(self) -> None:
        """Hold nothing any more, from the next plan on."""
        self._dropped += self._held
        self.due = True
        self._held.clear()
        self._used.clear()
        self._total = 0
