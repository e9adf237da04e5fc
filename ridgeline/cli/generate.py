"""`ridgeline generate`: complete prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.cli.options import CLI_DEFAULTS, with_options
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import Headroom
from ridgeline.weights.folder import resolve_model
from ridgeline.weights.hub import is_hub_id

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline.text.outputs import CompletionOutput, RequestOutput


@with_options
def generate(
    prompts: list[str] = typer.Argument(None, metavar="PROMPT", help="Texts to complete; - reads standard input."),
    prompt_file: Path = typer.Option(None, help="File whose whole text is a prompt."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per prompt on standard output."),
    quiet: bool = typer.Option(False, "--quiet", help="No report on standard error."),
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete one prompt as a stream, or several as a batch."""
    texts = read_prompts(prompts or [], prompt_file)
    check_options(engine, sampling)
    from ridgeline.llm import LLM  # torch takes seconds to import; --help and usage errors need not wait

    with LLM(**engine) as llm:
        if not quiet:
            print(describe(llm), file=sys.stderr)
        params = merge_sampling(llm, sampling)
        if len(texts) == 1 and params.n == 1 and not as_json:
            outputs = [stream_to_stdout(llm, texts[0], params)]
        else:
            outputs = llm.generate(texts, params, use_tqdm=not quiet)
            for output in outputs:
                print(json.dumps(as_record(output), ensure_ascii=False) if as_json else _as_text(output))
    if not quiet:
        print(stats_line(outputs, llm.last_run), file=sys.stderr)
    raise_on_error(outputs)


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line: arguments, `-` for standard input, a file. Raise InvalidRequest."""
    texts = [_read_text("standard input", sys.stdin.buffer.read()) if text == "-" else text for text in given]
    if file is not None:
        try:
            texts.append(_read_text(str(file), file.read_bytes()))
        except OSError as error:
            raise InvalidRequest(f"{file} cannot be read: {error.strerror}.", param="prompt") from error
    if not texts:
        raise InvalidRequest(
            "there is no prompt; give one as an argument, or - to read standard input.", param="prompt"
        )
    return texts


def check_options(engine: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Raise InvalidConfig or InvalidRequest for what is wrong whatever the model is, before one is loaded."""
    config = LLMConfig(**engine)
    if str(config.model) and not is_hub_id(str(config.model)):
        resolve_model(config.model)
    guided = {"guidance_scale": 2.0} if "negative_prompt" in sampling else {}  # a model may set it
    SamplingParams(**{**CLI_DEFAULTS, **guided, **sampling})


def merge_sampling(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """Return the model's recommended parameters, overridden by what the user set."""
    return llm.get_default_sampling_params().replace(**{**CLI_DEFAULTS, **given})


def describe(llm: LLM) -> str:
    """Return one line about what was loaded and how much fits."""
    a = llm.assembly
    name = str(llm.config.model) or "embedded model"
    return f"{name} ({a.model.spec.architecture}, {a.dtype} on {a.device}): {a.memory}."


def stream_to_stdout(llm: LLM, prompt: Any, params: SamplingParams, *, echo: bool = True) -> RequestOutput:
    """Print a completion as it is written, and return the whole output."""
    if echo and isinstance(prompt, str):
        print(prompt, end="", flush=True)
    output = None
    for piece in llm.stream(prompt, params):
        print(piece.text, end="", flush=True)
        output = piece.request
    print(flush=True)
    assert output is not None, "a stream yields at least one piece"
    return output


def stats_line(outputs: list[RequestOutput], run: Headroom) -> str:
    """Return a line with prompt and output tokens, time to the first token, output tokens per second, and how near the
    limit that is."""
    stats = [c.metrics for output in outputs for c in output.outputs if c.metrics is not None]
    prompt, output = sum(len(o.prompt_token_ids) for o in outputs), sum(s.output_tokens for s in stats)
    cached = sum(s.cached_tokens for s in stats)
    started, ended = min(s.arrival for s in stats), max(s.finished for s in stats)
    firsts = sorted(s.first_token - s.arrival for s in stats if s.first_token is not None)
    ttft = f"{firsts[len(firsts) // 2] * 1e3:.0f} ms" if firsts else "none came"
    near = f", {run.share:.0%} of the hardware limit".replace("%", " %") if run.share is not None else ""
    return (
        f"{prompt} prompt tokens{f' ({cached} cached)' if cached else ''}, {output} output tokens, TTFT {ttft}, "
        f"{output / max(1e-9, ended - started):.1f} tokens/s{near}"
    )


def as_record(output: RequestOutput) -> dict[str, Any]:
    """Return a request's outcome for machines, with times in seconds."""
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "completions": [_completion_record(completion) for completion in output.outputs],
    }


def raise_on_error(outputs: list[RequestOutput]) -> None:
    """Exit with 1 if a request failed inside the engine."""
    for completion in (c for output in outputs for c in output.outputs if c.error):
        print(f"ridgeline: a request failed: {completion.error}", file=sys.stderr)
        raise typer.Exit(1)


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    stats = completion.metrics
    first = stats.first_token - stats.arrival if stats and stats.first_token is not None else None
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": [{i: asdict(p) for i, p in entry.items()} for entry in completion.logprobs]
        if completion.logprobs is not None
        else None,
        "ttft": first,
        "total_time": stats.finished - stats.arrival if stats else None,
        "cached_tokens": stats.cached_tokens if stats else 0,
        "error": completion.error,
    }


def _as_text(output: RequestOutput) -> str:
    return "\n".join(f"{output.prompt}{completion.text}" for completion in output.outputs)


def _read_text(source: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{source} is not valid UTF-8 (byte {error.start}).", param="prompt") from error
