"""Beam search that a body asks for: its parameters, and the fields that have no meaning beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ridgeline.core.plan.request import SamplingParams
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import GenerationBody
from ridgeline.text.beams import MAX_BEAMS, BeamSearchParams

# Fields of a body that also mean something to a beam search. It looks at all tokens, so a temperature changes nothing.
KEPT = ("n", "ignore_eos", "stop_token_ids", "skip_special_tokens", "temperature", "seed", "max_tokens", "detokenize")
# Others that would be ignored, beside those of SamplingParams.
LEFT_OUT = ("response_format", "structured_outputs", "echo", "suffix", "tools", "return_weight_versions")


def beams_of(body: GenerationBody, max_tokens: int | None) -> BeamSearchParams | None:
    """Return the parameters of the search that a body asks for, or None. Raise InvalidRequest for wrong ones."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise BadRequest("length_penalty needs use_beam_search to be true.", param="length_penalty")
        return None
    if (body.n or 1) > MAX_BEAMS:
        raise BadRequest(f"n is {body.n}, and a search has at most {MAX_BEAMS} beams; use fewer.", param="n")
    return BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=2**31 - 1 if max_tokens is None else max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or (),
    )


def beam_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the sampling parameters that a search keeps. Raise BadRequest for a field that it would ignore."""
    for field in dataclasses.fields(SamplingParams):
        value = getattr(body, field.name, None)
        if field.name not in KEPT and value is not None and value is not False and value != field.default:
            raise _refused(field.name)
    for name in LEFT_OUT:
        if getattr(body, name, None):
            raise _refused(name)
    kept = ("n", "ignore_eos", "stop_token_ids", "skip_special_tokens")
    return {name: value for name in kept if (value := getattr(body, name)) is not None}


def _refused(name: str) -> BadRequest:
    return BadRequest(f"beam search cannot be had with {name}; leave one of them out.", param=name)
