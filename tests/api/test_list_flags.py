"""Flags that take several words: a list keeps its words, and nothing secret is a model or part of a message."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import cli
from ridgeline.cli.lists import SECRETS, ListCommand, is_word
from ridgeline.cli.migrate import migrate
from ridgeline.cli.serve import ServeCommand, own_flags
from ridgeline.core.errors import RidgelineError
from ridgeline.core.settings.vllm_flags import Takes
from tests.command import run_here

WORDS = st.text("abcxyz019:_", min_size=1, max_size=8)


def migrated(command: str) -> tuple[list[str], str]:
    """The lines that `ridgeline migrate` prints, and its error."""
    with redirect_stdout(io.StringIO()) as out:
        try:
            migrate([command])
        except RidgelineError as error:
            return out.getvalue().splitlines(), str(error)
        except typer.Exit:
            pass
    return out.getvalue().splitlines(), ""


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All verbs, with the words that name them."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
    for name, inner in (below or {}).items():
        yield from verbs(inner, (*path, name))


VERBS = dict(verbs(typer.main.get_command(cli.app)))
LISTS = [(path, option) for path, verb in VERBS.items() for option in verb.params if getattr(option, "multiple", False)]
# Flags that stand between the words of a list: for each verb, the words, and what the parsed value must be.
BETWEEN: dict[str, tuple[list[str], str, Any]] = {
    "generate": (["--max-tokens", "5"], "max_tokens", 5),
    "transcribe": (["--max-tokens", "5"], "max_tokens", 5),
    "chat": (["--no-enforce-eager"], "enforce_eager", False),
    "quantize": (["--device", "cpu"], "device", "cpu"),
    "shard-graph": (["--tokens", "5"], "tokens", 5),
    "compile-graph": (["--target", "sm_90"], "target", "sm_90"),
    "profile": (["--batch", "3"], "batch", 3),
    "plan": (["--utilization", "0.5"], "utilization", 0.5),
    "bench serve": (["--rate", "4"], "rate", "4"),
    "bench sweep": (["--seconds", "9"], "seconds", 9.0),
    "eval capacity": (["--device", "cpu"], "device", "cpu"),
    "serve": (["--port=80"], "port", 80),
    "run-batch": (["--seed", "-3"], "seed", -3),
    "simulate": (["--seed", "3"], "seed", 3),
    "route": (["--port", "80"], "port", 80),
}
NEEDED = {
    "simulate": ["--gpu", "H200"],
    "quantize": ["--out", "o"],
    "profile": ["--out", "o"],
    "plan": ["--gpu", "H200"],
    "run-batch": ["-i", "i", "-o", "o"],
}


def test_every_verb_with_a_list_reads_it_so() -> None:
    assert len(LISTS) > 15
    for path, option in LISTS:
        assert isinstance(VERBS[path], (ListCommand, ServeCommand)), option.name
        assert " ".join(path) in BETWEEN


@st.composite
def lines(draw: st.DrawFn, flag: str, values: list[str], between: list[str], argument: str | None) -> list[str]:
    """A command line that gives these values to a list in one of the ways there are, and an argument, or none."""
    groups, left = list[list[str]](), values
    while left:
        count = draw(st.integers(1, len(left)))
        groups, left = [*groups, left[:count]], left[count:]
    spelled = [[f"{flag}={group[0]}", *group[1:]] if draw(st.booleans()) else [flag, *group] for group in groups]
    spelled.insert(draw(st.integers(0, len(spelled))), between)
    words = [word for group in spelled for word in group]
    if argument is None:
        return words
    return [argument, *words] if draw(st.booleans()) else [*words, "--", argument]


@pytest.mark.few(20)
@pytest.mark.parametrize(("path", "option"), LISTS, ids=[f"{' '.join(path)} {each.opts[0]}" for path, each in LISTS])
@settings(max_examples=25)
@given(data=st.data())
def test_a_list_keeps_its_words_and_nothing_else_is_the_argument(
    path: tuple[str, ...], option: Any, data: st.DataObject
) -> None:
    verb, name = VERBS[path], " ".join(path)
    numbers = {
        "stop_token_ids": st.integers(0, 999),
        "tokens": st.integers(1, 999),
        "factor": st.integers(1, 4).map(float),
    }
    values = data.draw(st.lists(numbers.get(option.name, WORDS), min_size=1, max_size=4))
    between, other, expected = BETWEEN[name]
    argument = next((p for p in verb.params if p.param_type_name == "argument"), None)
    given_argument = data.draw(WORDS if argument and argument.required else st.none() | WORDS) if argument else None
    words = [*between, *NEEDED.get(name, [])]
    line = data.draw(lines(option.opts[0], [str(value) for value in values], words, given_argument))
    params = verb.make_context(name, line).params
    assert list(map(str, params[option.name])) == list(map(str, values))  # some are paths
    assert params[other] == expected
    if argument:
        found = params[argument.name]
        listed = [] if not found else found if argument.nargs == -1 else [found]
        assert [str(each) for each in listed] == ([given_argument] if given_argument else [])


@settings(max_examples=40)
@given(
    data=st.data(),
    flag=st.sampled_from(sorted(name for name, takes in own_flags().items() if takes is Takes.LIST)),
    values=st.lists(WORDS, min_size=1, max_size=4),
    model=st.none() | WORDS,
)
def test_migrate_gives_lists_the_same_words(
    data: st.DataObject, flag: str, values: list[str], model: str | None
) -> None:
    line = data.draw(lines(f"--{flag}", values, ["--host", "h"], model))
    printed = migrated(shlex.join(["vllm", "serve", *line]))[0][0]
    verb = VERBS[("serve",)]
    ours = verb.make_context("serve", shlex.split(printed)[2:]).params
    assert ours[flag.replace("-", "_")] == values
    assert (ours["model"] or None) == ([model] if model else None)
    assert ours == verb.make_context("serve", line).params


@st.composite
def careless(draw: st.DrawFn) -> list[str]:
    """A command line with secrets, as one writes it who makes mistakes. Each secret begins with sk or -sk."""
    secret = st.from_regex(r"\A-{0,2}sk[a-z0-9]{6}\Z")
    line = list[str]()
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from([*sorted(SECRETS), "api_key", "apikey", "api-key.x", "admin-keys"]))
        words = draw(st.lists(secret if name.replace("_", "-") in SECRETS else secret.filter(is_word), max_size=3))
        flag = f"--{name}"
        line += [f"{flag}={words[0]}", *words[1:]] if words and draw(st.booleans()) else [flag, *words]
        line += draw(st.sampled_from([[], ["--port", "80"], ["--prot", "80"], ["--log-json"], ["--rate=4"]]))
    return draw(st.sampled_from([[], ["m"]])) + line + draw(st.sampled_from([[], ["--", "m"]]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["serve", "run-batch", "bench serve"])
@settings(max_examples=80)
@given(line=careless())
def test_no_secret_is_a_model_or_in_a_message(name: str, line: list[str]) -> None:
    verb, said = VERBS[tuple(name.split())], ""
    try:
        params = verb.make_context(name, [*NEEDED.get(name, []), *line]).params
    except RidgelineError as error:
        said = str(error)
    except Exception as error:
        said = error.format_message()  # type: ignore[attr-defined]  # typer's, or click's
    else:
        model = params.get("model") or []
        assert "sk" not in " ".join([model] if isinstance(model, str) else model)
    assert "sk" not in said


@settings(max_examples=40)
@given(
    line=careless(), before=st.sampled_from(["vllm serve", "VLLM_API_KEY=skhidden vllm serv", "docker run -e A=sk x"])
)
def test_migrate_shows_no_secret_in_an_error(line: list[str], before: str) -> None:
    printed, error = migrated(f"{before} {shlex.join(line)}")
    assert bool(printed) is not bool(error)
    assert "sk" not in "".join([*printed[1:], error])


def test_a_key_is_not_looked_up_as_a_model() -> None:
    """192.0.2.1 is no address of this machine, so the server ends before it loads anything."""
    done = run_here("serve", "--host", "192.0.2.1", "--api-key", "first-secret", "second-secret")
    assert done.returncode == 2
    assert "192.0.2.1" in done.stderr
    assert "secret" not in done.stderr
    assert "all words after --api-key are its own" in done.stderr


def test_rungs_in_the_place_of_a_model_give_no_hint_where_the_model_stands() -> None:
    done = run_here("profile", "--ncu", "--rungs", "gemm:a", "gemm:b", "--out", "o")
    assert done.returncode == 2
    assert done.stderr == (
        "ridgeline: the gemm ladder has no rung 'a'; `ridgeline bench kernels --ladder gemm` lists them.\n"
    )


def test_a_secret_flag_behind_the_end_of_flags_is_none() -> None:
    done = run_here("serve", "--port", "80", "--", "m", "--api-key", "secret")
    assert done.returncode == 2
    assert "--api-key stands behind --" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "m", "--api-key"],
        ["serve", "m", "--api-key", "--port", "80"],
        ["serve", "m", "--allowed-methods", "[]"],
        ["generate", "--stop"],
        ["generate", "--stop", "--", "a"],
        ["generate", "--stop", "--seed", "1", "a"],
        ["quantize", "m", "--out", "o", "--ignore"],
    ],
)
def test_a_list_without_words_is_refused(arguments: list[str]) -> None:
    """A server whose operator asked for keys must not stand open because a variable was empty."""
    done = run_here(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs at least one word" in done.stderr


def test_a_file_of_settings_that_is_no_yaml_shows_no_key(tmp_path: Any) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 80\napi_key: 'secret\n")
    done = run_here("serve", "--config", file)
    assert done.returncode == 2
    assert "secret" not in done.stderr
    assert f"{file}, line" in done.stderr


def test_migrate_passes_a_key_that_docker_takes_from_outside_on_by_name() -> None:
    assert migrated("docker run -eVLLM_API_KEY=a vllm/vllm-openai --model m")[0][0].startswith("RIDGELINE_API_KEY=a r")
    first, *told = migrated("docker run -e VLLM_API_KEY vllm/vllm-openai --model m")[0]
    assert first.startswith("ridgeline serve m ")
    assert any("set RIDGELINE_API_KEY" in line for line in told)
