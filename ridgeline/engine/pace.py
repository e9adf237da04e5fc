"""The size that steps may have: as configured, smaller for a while after the device ran out of memory."""

from __future__ import annotations

import logging

from ridgeline.core.plan.step import StepPlan

logger = logging.getLogger(__name__)

GOOD_STEPS = 1024  # after so many the step may double again


class Pace:
    """tokens: of one step at most. rows: sequences running at once at most. tokens_each: that a decoding one brings.
    shrunk: these are fewer than configured."""

    def __init__(self, max_tokens: int, max_rows: int, tokens_each: int = 1) -> None:
        self._full = max_tokens, max_rows
        self._each = tokens_each
        self.tokens, self.rows = self._full
        self._good, self.shrunk = 0, False
        self._least, self._prompt = 1, 1

    def keep_room(self, rows: int, prompt: int = 1) -> None:
        """Some request runs so many rows in one step, or so many tokens of a prompt, so steps never become smaller than
        that."""
        self._least, self._prompt = max(self._least, rows), max(self._prompt, prompt)
        self.tokens, self.rows = max(self.tokens, self._fewest), max(self.rows, self._least)

    @property
    def _fewest(self) -> int:
        return max(self._least * self._each, self._prompt)

    def shrink(self, plan: StepPlan) -> bool:
        """The plan did not fit into the device's memory: plan half of it from now on. False if that cannot be."""
        least = self._fewest
        if plan.num_tokens <= least:
            return False
        self._good, self.shrunk = 0, True
        self.tokens = max(least, plan.num_tokens // 2)
        self.rows = min(self.rows, self.tokens // self._each)
        logger.warning(
            "the device ran out of memory in a step of %d tokens; its requests start over in steps of at most %d",
            plan.num_tokens,
            self.tokens,
        )
        return True

    def went_well(self) -> None:
        """A step is done while steps are smaller than configured."""
        self._good += 1
        if self._good >= GOOD_STEPS:
            self._good = 0
            self.tokens, self.rows = min(2 * self.tokens, self._full[0]), min(2 * self.rows, self._full[1])
            self.shrunk = (self.tokens, self.rows) != self._full
