"""`ridgeline chat`: talk to a model through its chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from ridgeline.cli.generate import (
    as_record,
    check_options,
    describe,
    merge_sampling,
    raise_on_error,
    stats_line,
    stream_to_stdout,
)
from ridgeline.cli.options import with_options
from ridgeline.core.errors import InvalidRequest


@with_options
def chat(
    message: str = typer.Argument(None, help="One message to answer; without it, a conversation until end of input."),
    system: str = typer.Option(None, help="System message."),
    image: list[Path] = typer.Option([], "--image", help="File of a picture in the first message; may be repeated."),
    video: list[Path] = typer.Option([], "--video", help="File of a video there."),
    audio: list[Path] = typer.Option([], "--audio", help="File of a sound there."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per answer on standard output."),
    quiet: bool = typer.Option(False, "--quiet", help="No report on standard error."),
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer a message, or hold a conversation."""
    check_options(engine, sampling)
    shown = parts_of(image=image, video=video, audio=audio)
    from ridgeline.llm import LLM  # torch takes seconds to import; --help and usage errors need not wait

    with LLM(**engine) as llm:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        # without a template this fails before anyone types
        llm.chat_prompt([*messages, {"role": "user", "content": [*shown, _text("?")] if shown else "?"}])
        if not quiet:
            print(describe(llm), file=sys.stderr)
        params = merge_sampling(llm, sampling)
        for text in [message] if message is not None else _lines():
            messages.append({"role": "user", "content": [*shown, _text(text)] if shown else text})
            shown = []
            prompt = llm.chat_prompt(messages)
            if as_json:
                [output] = llm.generate([prompt], params, use_tqdm=False)
                print(json.dumps(as_record(output), ensure_ascii=False), flush=True)
            else:
                output = stream_to_stdout(llm, prompt, params)
            if not quiet:
                print(stats_line([output], llm.last_run), file=sys.stderr)
            raise_on_error([output])
            messages.append({"role": "assistant", "content": output.outputs[0].text})


def parts_of(**files: list[Path]) -> list[dict[str, Any]]:
    """Return the parts of a message that show files, by their kinds. Raise InvalidRequest for one that is none."""
    found = list[dict[str, Any]]()
    for kind, given in files.items():
        for file in given:
            if not file.is_file():
                raise InvalidRequest(f"--{kind} is {str(file)!r:.200}, which is no file.")
            found.append({"type": kind, kind: file})
    return found


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _lines() -> Any:
    """Yield the lines that the user types, until the end of input. Blank lines are skipped."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if text.strip():
            yield text
