"""The special tokens of Whisper's vocabularies, and the rules of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.core.plan.sounds import SpeechRules
from ridgeline.text.speech.languages import LANGUAGES
from ridgeline.text.tokenizer import Tokenizer

TASKS = ("transcribe", "translate")
STEP = 0.02  # seconds from one time to the next
LATEST = 50  # of the first time: 1 s, as in Whisper's own code


@dataclass(frozen=True, kw_only=True)
class SpeechTokens:
    """Token ids by their meaning.

    languages: by code; empty: the model knows English alone, and has no tasks.
    begins, before: what begins a transcript, and the text before it.
    heads: (layer, head) of cross attention that follow the sound; none: it is not known which do.
    silent: says that nobody speaks. untimed: no times follow. times: the first of them.
    """

    begins: int
    end: int
    before: int
    silent: int
    untimed: int
    times: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    not_first: tuple[int, ...]
    latest: int | None
    heads: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, generation: Mapping[str, Any]) -> SpeechTokens:
        """Return those of a tokenizer. generation: generation_config.json. Raise ModelLoadError if some are missing."""

        def named(*names: str) -> int:
            found = next((i for name in names if (i := tokenizer.id_of(f"<|{name}|>")) is not None), None)
            if found is None:
                raise ModelLoadError(f"the tokenizer has no <|{names[0]}|>, and is none for transcripts.")
            return found

        untimed = named("notimestamps")
        begins, silent, before = named("startoftranscript"), named("nospeech", "nocaptions"), named("startofprev")
        tasks = {name: i for name in TASKS if (i := tokenizer.id_of(f"<|{name}|>")) is not None}
        spoken = generation.get("is_multilingual", True) is not False
        languages = {code: i for code in LANGUAGES if (i := tokenizer.id_of(f"<|{code}|>")) is not None}
        never = (*tasks.values(), begins, before, silent, *filter(None, (tokenizer.id_of("<|startoflm|>"),)))
        end = named("endoftext")
        latest = generation.get("max_initial_timestamp_index", LATEST)
        return cls(
            begins=begins,
            end=end,
            before=before,
            silent=silent,
            untimed=untimed,
            times=untimed + 1,
            languages=languages if spoken else {},
            tasks=tasks if spoken else {},
            suppressed=tuple(sorted({*_ids(generation.get("suppress_tokens")), *never})),
            not_first=_ids(generation.get("begin_suppress_tokens")) or (*tokenizer.encode(" ", False)[:1], end),
            latest=latest if isinstance(latest, int) else None,
            heads=_heads(generation.get("alignment_heads")),
        )

    def prefix(self, language: str | None, task: str, *, timed: bool) -> list[int]:
        """Return the tokens that a transcript follows."""
        found = [self.begins]
        if self.languages:
            found += [self.languages[language or "en"], self.tasks[task]]
        return found if timed else [*found, self.untimed]

    def rules(self, *, timed: bool) -> SpeechRules:
        return SpeechRules(
            suppressed=self.suppressed,
            not_first=self.not_first,
            timestamps=self.times if timed else 0,
            no_timestamps=self.untimed,
            end=self.end,
            latest=self.latest,
        )

    def code(self, language: str) -> str:
        """Return the code of a language by its code or its English name. Raise InvalidRequest if the model has not
        learned it."""
        wanted = language.strip().lower()
        code = next((code for code, name in LANGUAGES.items() if wanted in (code, name)), wanted.partition("-")[0])
        known = self.languages or {"en": 0}
        if code not in known:
            raise InvalidRequest(
                f"language is {language[:40]!r}, which this model has not learned; it knows {', '.join(known)}.",
                param="language",
            )
        return code


def _heads(value: Any) -> tuple[tuple[int, int], ...]:
    listed: Sequence[Any] = value if isinstance(value, list) else ()
    return tuple((pair[0], pair[1]) for each in listed if isinstance(each, list) and len(pair := _ids(each)) == 2)


def _ids(value: Any) -> tuple[int, ...]:
    listed: Sequence[Any] = value if isinstance(value, list) else ()
    return tuple(i for i in listed if isinstance(i, int) and i >= 0)
