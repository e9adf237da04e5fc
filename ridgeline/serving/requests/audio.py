"""The form of a transcription: OpenAI's fields, vLLM's, and those of Whisper's own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import LAX, LAX_INT, Body
from ridgeline.serving.requests.fields import Refusal
from ridgeline.serving.requests.validation import parse
from ridgeline.text.speech.recogniser import SpeechOptions

MOST_PROMPT = 4096  # characters
SAMPLING = ("top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
Real = Annotated[float, LAX]
Whole = Annotated[int, LAX_INT]


class TranslationBody(Body):
    """The fields of POST /v1/audio/translations beside `file`."""

    harmless: ClassVar[Mapping[str, str]] = {
        "stream_include_usage": "the last event of a stream always counts the seconds",
        "stream_continuous_usage_stats": "the last event of a stream counts the seconds",
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        "use_beam_search": Refusal("use_beam_search is not for models with an encoder yet; leave it out."),
        "hotwords": Refusal("hotwords are not supported; put the words into prompt."),
    }

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MOST_PROMPT)] | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = None
    temperature: Real | None = None
    stream: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1), LAX_INT] | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    min_p: Real | None = None
    seed: Whole | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    condition_on_previous_text: bool | None = None
    compression_ratio_threshold: Real | None = None
    logprob_threshold: Real | None = None
    no_speech_threshold: Real | None = None

    def options(self, task: Literal["transcribe", "translate"]) -> SpeechOptions:
        """Return the wishes. Without a format with times none are asked of the model."""
        given: dict[str, Any] = {
            name: value
            for name in ("prompt", "temperature", "condition_on_previous_text", "compression_ratio_threshold",
                         "logprob_threshold", "no_speech_threshold")
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        sampling = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        timed = self.response_format in ("srt", "vtt", "verbose_json") or bool(self.condition_on_previous_text)
        return SpeechOptions(
            task=task,
            language=getattr(self, "language", None) or None,
            timed=timed,
            word_timestamps="word" in (getattr(self, "timestamp_granularities", None) or ()),
            max_tokens=self.max_completion_tokens,
            sampling=sampling,
            **given,
        )


class TranscriptionBody(TranslationBody):
    """The fields of POST /v1/audio/transcriptions beside `file`."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **TranslationBody.refused,
        "include": Refusal("include is not supported: transcripts have no logprobs of tokens; leave it out."),
        "chunking_strategy": Refusal("chunking_strategy is not supported: sounds are cut where they are quiet."),
        "known_speaker_names": Refusal("speakers are not told apart here; leave known_speaker_names out."),
        "known_speaker_references": Refusal("speakers are not told apart here; leave known_speaker_references out."),
    }

    language: Annotated[str, Field(max_length=64)] | None = None
    timestamp_granularities: Annotated[list[Literal["segment", "word"]], Field(max_length=2)] | None = None


def body_of(listed: Mapping[str, list[str]], model: type[TranslationBody]) -> TranslationBody:
    """Return a form's fields, of each of which there may be several. Raise BadRequest for fields that are wrong, or ask
    for what is not here."""
    given: dict[str, Any] = {}
    for name, values in listed.items():
        bare = name.removesuffix("[]")
        given[bare] = values if bare in LISTS else values[-1]
    for name in ("stream", "condition_on_previous_text"):
        if isinstance(value := given.get(name), str):
            given[name] = TRUTHS.get(value.lower(), value)
    body = parse(model, {name: value for name, value in given.items() if value != "" or name == "prompt"})
    if body.stream and "word" in (getattr(body, "timestamp_granularities", None) or ()):
        raise BadRequest("a stream has no times of words; leave stream out.", param="timestamp_granularities")
    if getattr(body, "timestamp_granularities", None) and body.response_format != "verbose_json":
        raise BadRequest(
            "timestamp_granularities needs response_format verbose_json; set that, or leave it out.",
            param="timestamp_granularities",
        )
    if body.stream and body.response_format not in (None, "json", "text"):
        raise BadRequest(f"a stream has no response_format {body.response_format}; leave it out.", param="stream")
    if body.temperature is not None and not 0 <= body.temperature <= 2:
        raise BadRequest(f"temperature must be from 0 to 2, got {body.temperature:g}.", param="temperature")
    return body
