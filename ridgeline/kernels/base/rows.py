"""The words between a step's rows and the ops that draw and check their tokens: work to do, and reasons to end."""

from __future__ import annotations

from enum import IntFlag


class Feature(IntFlag):
    """A piece of work that the sample segment does for at least one row. The union over the rows picks the segment's
    variant. `Rows` have it as a number, and the scheduler compares numbers: each `&` of an IntFlag takes a
    microsecond."""

    NONE = 0
    RANDOM = 1  # some temperature > 0
    FILTER = 2  # top-k, top-p, min-p or typical-p
    PENALTY = 4  # repetition, presence or frequency
    BIAS = 8  # logit_bias
    MIN_TOKENS = 16
    LOGPROBS = 32
    PROMPT_LOGPROBS = 64
    MASK = 128  # waits for token masks
    TYPICAL = 256  # typical-p among the filters
    GUIDANCE = 512  # some rows' scores are computed from those of two rows (`Rows.guided`)
    APART = 1024  # some rows have logprobs of their own: of tokens that the request names, or of very many
    GIVEN = 2048  # some masked rows verify drafts, which come with their masks: the whole step waits for these
    ADAPTER = 4096  # some rows have an adapter
    SPEECH = 8192  # some rows have rules of a recogniser, which come before logprobs


class Finish:
    """Codes for the reason why the device stopped a row. NAN: its scores were not numbers, so there was no token to
    draw."""

    NONE, STOP, LENGTH, NAN = 0, 1, 2, 3
