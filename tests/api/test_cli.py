"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from ridgeline.cli import app
from ridgeline.cli.options import ENGINE_HELP, SAMPLING_HELP
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.config import LLMConfig
from tests.command import run_here


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "ridgeline", *arguments], input=stdin, capture_output=True, timeout=280, check=False
    )


def test_generate_streams_and_ends_with_a_stats_line(text_model: Path) -> None:
    done = run(
        "generate",
        "the quick",
        "--device",
        "cpu",
        "--model",
        str(text_model),
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"the quick")
    last = done.stderr.decode().strip().splitlines()[-1]
    for part in ("prompt tokens", "output tokens", "TTFT", "tokens/s"):
        assert part in last


def test_json_has_one_object_per_prompt(text_model: Path) -> None:
    done = run_here(
        "generate", "the", "fox", "--device", "cpu", "--model", str(text_model), "--json", "--quiet",
        "--max-tokens", "4", "--ignore-eos", "--temperature", "0", "--logprobs", "1",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["the", "fox"]
    assert all(len(record["completions"][0]["token_ids"]) == 4 for record in records)
    assert all(len(record["completions"][0]["logprobs"]) == 4 for record in records)


def test_chat_answers_one_message_and_a_conversation_on_standard_input(text_model: Path) -> None:
    common = (
        "--model",
        str(text_model),
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--ignore-eos",
        "--json",
        "--quiet",
    )
    one = run_here("chat", "hens", *common)
    assert one.returncode == 0, one.stderr
    two = run_here("chat", *common, stdin=b"hens\n\nthe fox\n")
    answers = [json.loads(line) for line in two.stdout.splitlines()]
    assert len(answers) == 2
    assert answers[0]["completions"][0]["token_ids"] == json.loads(one.stdout)["completions"][0]["token_ids"]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"]


def test_models_lists_and_describes(text_model: Path) -> None:
    listed = json.loads(run_here("models", "--json").stdout)
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel"} <= set(listed)
    described = json.loads(run_here("models", text_model, "--json").stdout)
    from tests import tiny_models

    oracle = tiny_models.build("llama")
    assert described["parameters"] == sum(p.numel() for p in oracle.parameters())


def test_models_tells_what_of_a_mixture_a_token_uses(tiny_model: Callable[[str], Path]) -> None:
    from tests import tiny_models

    described = json.loads(run_here("models", tiny_model("qwen2_moe"), "--json").stdout)
    sizes = {name: tensor.numel() for name, tensor in tiny_models.build("qwen2_moe").named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    assert described["parameters"] == sum(sizes.values())
    assert described["parameters of a token"] == sum(sizes.values()) - of_experts // 2  # 3 of 6
    assert described["experts"] == "3 of 6 and a shared one in 2 layers"


@pytest.mark.parametrize(
    ("arguments", "stdin", "word"),
    [
        (["generate"], b"", "no prompt"),
        (["generate", "x", "--model", "/no/such"], b"", "/no/such"),
        (["generate", "-"], b"\xff\xfe", "UTF-8"),
        (["generate", "--prompt-file", "/no/such.txt"], b"", "/no/such.txt"),
        (["generate", "x", "--device", "cpu", "--model", "MODEL", "--temperature", "-1"], b"", "temperature"),
        (["generate", "x", "--device", "cpu", "--model", "MODEL", "--top-p", "nan"], b"", "top_p"),
        (["generate", "x", "--device", "cpu", "--model", "MODEL", "--dtype", "int3"], b"", "int3"),
        (["generate", "x", "--device", "cpu", "--model", "MODEL", "--max-tokens", "many"], b"", "--max-tokens"),
        (["generate", "", "--device", "cpu", "--model", "MODEL"], b"", "empty"),
        (["generate", b"caf\xe9", "--device", "cpu", "--model", "MODEL"], b"", "not valid text"),
        (["models", "/no/such"], b"", "/no/such"),
        (["train", "pretrain", "--out", "/etc/passwd", "--steps", "1"], b"", "/etc/passwd"),
        (["train", "pretrain", "--out", "/nowhere", "--steps", "1", "--max-train-mb", "nan"], b"", "nan"),
        (["frobnicate"], b"", "frobnicate"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(text_model: Path, arguments: list, stdin: bytes, word: str) -> None:
    done = run_here(*[text_model if argument == "MODEL" else argument for argument in arguments], stdin=stdin)
    message = done.stderr
    assert done.returncode == 2, message
    assert word in message
    assert "Traceback" not in message


def test_every_field_is_an_option_or_deliberately_not() -> None:
    """A new field must be given an option or listed here."""
    assert set(LLMConfig.__dataclass_fields__) - set(ENGINE_HELP) == {"skip_tokenizer_init", "kernels"}
    hidden = {"logit_bias", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "prompt_logprobs"}
    hidden |= {"prompt_logprobs_start", "allowed_token_ids", "bad_words", "best_of"}
    hidden |= {"logprob_token_ids", "repetition_detection"}
    assert set(SamplingParams.__dataclass_fields__) - set(SAMPLING_HELP) == hidden


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_sizes_of_groups_have_short_names_too(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    sizes = {"data": "--dp", "tensor": "--tp", "pipeline": "--pp", "prefill_context": "--cp"}
    for number, (axis, flag) in enumerate(sizes.items(), 2):
        asked = command.make_context(verb, ["m", flag, str(number)]).params
        assert asked[f"{axis}_parallel_size"] == number


def test_help_does_not_load_torch() -> None:
    code = "import sys, ridgeline.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=280, check=False).returncode == 0


def shell(command: str, text_model: Path) -> subprocess.CompletedProcess[bytes]:
    """`$R` is the command line, `$M` the model; the exit code is the first process's of a pipe."""
    script = f"{command}; exit ${{PIPESTATUS[0]}}"
    names = {"R": f"{sys.executable} -m ridgeline", "M": str(text_model)}
    return subprocess.run(
        ["bash", "-c", script], env={**os.environ, **names}, capture_output=True, timeout=280, check=False
    )


@pytest.mark.dealt
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("$R generate the --model $M --ignore-eos --max-tokens 200 --quiet | head -c 1", 0),
        ("$R generate the --model $M --max-tokens 2 --quiet >&-", 0),
        pytest.param("$R generate the --model $M --max-tokens 2 2>&-", 0, marks=pytest.mark.thorough),
        ("PYTHONIOENCODING=ascii $R generate 'h\u00e9n' --model $M --max-tokens 2 --quiet", 0),
        ("$R generate - --model $M --max-tokens 2 <&-", 2),
        ("$R generate the --model $M --max-tokens 2 > /dev/full", 2),
    ],
)
def test_streams_that_are_closed_full_or_poor(text_model: Path, command: str, code: int) -> None:
    done = shell(command, text_model)
    assert b"Traceback" not in done.stderr
    assert done.returncode == code, done.stderr


def test_a_negative_prompt_is_taken_with_a_scale(text_model: Path) -> None:
    common = ("generate", "the", "--model", text_model, "--max-tokens", "2", "--negative-prompt", "the dog")
    assert run_here(*common, "--guidance-scale", "2").returncode == 0
    assert run_here(*common).returncode == 2


def test_help_names_the_defaults() -> None:
    assert b"(default: 256)" in b" ".join(run("generate", "--help").stdout.replace("│".encode(), b" ").split())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--min-tokens", "300"], "min_tokens is 300"),
        (["chat", "x", "--temperature", "-1"], "temperature"),
        (["chat", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--model", "./no/such"], "the folder './no/such' does not exist"),
        (["serve", "./no/such"], "the folder './no/such' does not exist"),
        (["plan", "./no/such", "--gpu", "h100"], "the folder './no/such' does not exist"),
    ],
)
def test_mistakes_are_told_before_torch_is_imported(arguments: list[str], word: str) -> None:
    """torch and a model take seconds."""
    program = (
        "import sys\nfrom ridgeline import cli\ntry:\n    cli.main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1
