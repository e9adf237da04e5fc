"""`ridgeline transcribe`: write what is said in files of sound."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.cli.options import with_options
from ridgeline.core.errors import InvalidRequest
from ridgeline.text.speech.formats import FORMATS

if TYPE_CHECKING:
    from ridgeline.text.speech.recogniser import SpokenText

SAMPLED = ("top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
TIMED = ("srt", "vtt", "json")


@with_options
def transcribe(
    files: list[Path] = typer.Argument(..., metavar="FILE", help="Files of sound."),
    form: str = typer.Option("text", "--format", help="text, srt, vtt or json, which has all that is known."),
    language: str = typer.Option(None, help="Code or name of the language (told from the sound)."),
    translate: bool = typer.Option(False, "--translate", help="Write English, whatever is spoken."),
    prompt: str = typer.Option("", help="Text before the transcript, such as names."),
    in_turn: bool = typer.Option(False, "--in-turn", help="Each window follows the text of the one before."),
    words: bool = typer.Option(False, "--words", help="With json: words have times too."),
    quiet: bool = typer.Option(False, "--quiet", help="No report on standard error."),
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Write what is said in files of sound. Without --model the embedded one of synthetic speech runs."""
    if form not in (*FORMATS, "json"):
        raise InvalidRequest(f"--format is {form!r}; it is one of {', '.join((*FORMATS, 'json'))}.", param="format")
    if words and form != "json":
        raise InvalidRequest(f"--words needs --format json, got {form}.", param="words")
    if missing := [file for file in files if not file.is_file()]:
        raise InvalidRequest(f"{missing[0]} is no file; name a file of sound.", param="audio")
    for name in sampling.keys() - {"temperature", "max_tokens", *SAMPLED}:
        raise InvalidRequest(f"{name} is not for transcripts; leave it out.", param=name)
    from ridgeline.core.clock import MONOTONIC  # torch takes seconds to import; usage errors need not wait
    from ridgeline.llm import LLM
    from ridgeline.weights.folder import EMBEDDED_SPEECH

    engine["model"] = engine["model"] or str(EMBEDDED_SPEECH)
    temperature = float(sampling.pop("temperature", 0.0))
    most = sampling.pop("max_tokens", None)
    with LLM(**engine) as llm:
        for file in files:
            began = MONOTONIC()
            found = llm.transcribe(
                file,
                language=language,
                task="translate" if translate else "transcribe",
                prompt=prompt,
                temperature=temperature,
                timed=form in TIMED or in_turn,
                word_timestamps=words,
                condition_on_previous_text=in_turn,
                max_tokens=most,
                sampling=sampling,
            )
            print(_shown(found, form), end="", flush=True)
            if not quiet:
                spent = MONOTONIC() - began
                print(
                    f"{file}: {found.seconds:.1f} s of sound in {spent:.1f} s ({found.seconds / spent:.3g} times real "
                    f"time), language {found.language}, {found.written} tokens.",
                    file=sys.stderr,
                )


def _shown(found: SpokenText, form: str) -> str:
    if form == "json":
        return json.dumps({**asdict(found), "text": found.text}, ensure_ascii=False) + "\n"
    return FORMATS[form](found.segments)
