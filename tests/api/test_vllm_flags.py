"""Command lines and keyword arguments as vLLM's users write them."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ridgeline import LLM, cli
from ridgeline.cli.lists import SECRETS
from ridgeline.cli.serve import own_flags, read_file
from ridgeline.cli.translate import translate
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.settings.config import LLMConfig, count
from ridgeline.core.settings.vllm_flags import DEFAULTS, FLAGS, State, of_keywords
from ridgeline_bench.scripts.api_flags import PAGE, VLLM, page
from tests.api.conftest import write_tokenizer

OWN = own_flags()


def words(line: str) -> list[str]:
    found = translate(shlex.split(line), OWN)
    assert not found.unknown
    assert not found.refused, found.refused
    return [*found.models, *found.words]


# ---- the tables -------------------------------------------------------------------------------------------------


def test_every_flag_of_vllms_has_exactly_one_state() -> None:
    theirs = set(VLLM.read_text().split())
    assert len(theirs) > 300
    assert theirs - {"model"} <= OWN.keys() | FLAGS.keys()
    assert not OWN.keys() & FLAGS.keys(), "what is a setting of ours needs no row"
    assert not {name for name, flag in FLAGS.items() if not flag.text or flag.text.endswith(".")}
    ours = {flag.ours[2:].removeprefix("no-") for flag in FLAGS.values() if flag.state is State.RENAMED}
    assert ours <= OWN.keys()


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == page(), "run `python -m ridgeline_bench.scripts.api_flags`"


def test_own_flags_are_those_of_the_verb() -> None:
    verb = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    options = {
        parameter.name.replace("_", "-"): parameter for parameter in verb.params if parameter.opts[0][:2] == "--"
    }
    assert options.keys() - {"help"} == OWN.keys()
    for name, takes in OWN.items():
        parameter = options[name]
        kind = "list" if parameter.multiple else "switch" if parameter.is_flag else "value"
        assert takes.value == kind, name


# ---- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("m --served-model-name a b", "m --served-model-name a --served-model-name b"),
        ("m --api_key a b --port 1", "m --port 1 --api-key a --api-key b"),
        ("""m --allowed-origins '["*"]'""", "m --allowed-origins *"),
        ("""m --allowed-origins '["http://a", "http://b"]'""", "m --allowed-origins http://a --allowed-origins http://b"),
        ("--model m --max_model_len=8k", "m --max-model-len 8k"),
        ("--api-key a b", "--api-key a --api-key b"),
        ("--api-key=a b --port 2 -- m", "m --port 2 --api-key a --api-key b"),
        ("--api-key a --port 2 --api-key=b c", "--port 2 --api-key a --api-key b --api-key c"),
        ("--port 2 m --api-key a", "m --port 2 --api-key a"),
        ("--api-key a", "--api-key a"),
        ("m -tp 2 -q fp8", "m --tensor-parallel-size 2 --quantization fp8"),
        ("m --no-enable-prefix-caching", "m --no-enable-prefix-caching"),
        ("m --disable-prefix-caching", "m --no-enable-prefix-caching"),
        ("m --disable-cascade-attn", "m --no-cascade"),
        ("m --no-disable-cascade-attn", "m --cascade"),
        ("m --load-format gguf", "m --load-format auto"),
        ("m --kv-cache-memory-bytes 25.6k", "m --kv-cache-memory 25.6k"),
        ("""m --hf-overrides.rope_theta 1e6 --hf-overrides.a.b '"x"'""",
         """m --hf-overrides '{"rope_theta": 1000000.0, "a": {"b": "x"}}'"""),
        ("m --enable-chunked-prefill --swap-space 4 --disable-log-requests -O3 --no-enable-log-requests",
         "m --enable-chunked-prefill --kv-offloading-size 4"),
        ("m --ec-transfer-config {} --no-enable-prompt-adapter --response-role assistant", "m"),
        ("m --offload_group_size 4 --cpu-offload-params experts mlp.up_proj",
         "m --offload-group-size 4 --offload-params experts --offload-params mlp.up_proj"),
        ("""m --structured-outputs-config '{"backend": "xgrammar"}'""", "m"),
        ("""m --reasoning-config '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'""", "m"),
        ("m -O.mode=3 --compilation-config.cudagraph_mode FULL", "m"),
    ],
)  # fmt: skip
def test_a_command_line_of_vllms_is_ours(given: str, ours: str) -> None:
    assert words(given) == shlex.split(ours)
    assert words(ours) == shlex.split(ours), "ours is its own translation"


def test_an_object_is_harmless_with_the_values_that_ask_for_what_happens_anyway() -> None:
    ends = {"<think>": "reasoning_start_str", "\n\nNow the answer.</think>": "reasoning_end_str"}
    for value, key in ends.items():
        found = translate(["m", f"--reasoning-config.{key}", value], OWN)
        assert bool(found.refused) is (key == "reasoning_end_str")


def test_nothing_is_taken_in_silence() -> None:
    """Each flag without effect has its line, and so has one with another name."""
    for name, flag in FLAGS.items():
        if name == "kv-transfer-config":  # its object is read
            continue
        given = {"switch": [], "value": ["1.5"], "list": ["x", "y"]}[flag.takes]
        found = translate(["m", f"--{name}", *given], OWN)
        assert found.models == ["m"]
        [line] = found.lines
        assert line.flag == " ".join([f"--{name}", *([] if name in SECRETS else given)])
        assert line.state is flag.state
        assert flag.text in line.text
        assert bool(found.words) is (flag.state is State.RENAMED)


TIERS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 3 << 30,
        "secondary_tiers": [{"type": "fs", "root_dir": "/nvme/kv", "max_disk_gib": 200}],
    },
}
LMCACHE = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_connector_extra_config": {"lmcache.max_local_cpu_size": 5, "lmcache.local_disk": "file:///nvme/kv"},
}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (TIERS, "--kv-offloading-size 3.0 --kv-disk /nvme/kv --kv-disk-size 200.0"),
        (LMCACHE, "--kv-offloading-size 5.0 --kv-disk /nvme/kv"),
        ({}, ""),
    ],
)
def test_a_connector_that_offloads_is_our_tiers(given: dict[str, Any], ours: str) -> None:
    found = translate(["m", "--kv-transfer-config", json.dumps(given)], OWN)
    assert (found.words, found.refused) == (ours.split(), [])
    kept, _ = of_keywords({"kv_transfer_config": given}, frozenset())
    assert [f"{value}" for value in kept.values()] == ours.split()[1::2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "sends caches between servers"),
        ({**TIERS, "kv_role": "kv_producer"}, "kv_role must be kv_both"),
        ({"kv_connector": "OffloadingConnector"}, "does not say how many bytes"),
        ({"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"remote_url": "lm://x:1"}}, "remote_url"),
        ({**TIERS, "kv_connector_extra_config": {"cpu_bytes_to_use": -1}}, "cpu_bytes_to_use must be a number above 0"),
        ({**TIERS, "kv_connector_extra_config": {"secondary_tiers": [{"type": "p2p"}]}}, "may be one of type"),
        ([1], "must be a JSON object"),
    ],
)
def test_another_connector_is_refused_with_the_flags_there_are(given: object, said: str) -> None:
    [line] = translate(["m", "--kv-transfer-config", json.dumps(given)], OWN).refused
    assert said in line.text
    assert given == [1] or "--kv-offloading-size" in line.text or "number" in line.text
    with pytest.raises(InvalidConfig, match=said):
        of_keywords({"kv_transfer_config": given}, frozenset())


def test_several_models_are_named_in_either_way_and_unknown_flags_stay() -> None:
    assert translate(["a", "--model", "b", "--port", "1", "c=d", "--model=e"], OWN).models == ["a", "b", "c=d", "e"]
    assert translate(["a", "--frob", "3"], OWN).unknown == [["--frob", "3"]]


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ridgeline", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--enable-prompt-adapter"], "--enable-prompt-adapter is not supported: prompt adapters"),
        (["--speculative_model", "draft"], "--speculative_model"),
        (["--structured-outputs-config.disable_any_whitespace", "true"], "only the key `backend`"),
        (["--max-model-len", "8Q"], "8Q"),
        (["--hf-overrides", "{"], "--hf-overrides must be a JSON object"),
        (["--speculative-config", "[" * 100_000], "--speculative-config must be a JSON object"),
        (["--speculative-config.model", "[" * 100_000], "num_speculative_tokens of speculative_config is missing"),
        (["--speculative-config", '{"method": "mtp", "method": "ngram"}'], "has the key 'method' twice in one object"),
        (["--speculative-config.method", "mtp", "--speculative-config.method", "ngram"], "config.method is given alr"),
        (["--speculative-config.a", "x", "--speculative-config.a.b", "1"], "--speculative-config.a.b is given already"),
        (["--speculative-config.a", "1", "--speculative-config.a+", "2"], "--speculative-config.a+ is given already"),
        (["--speculative-config", NGRAM, "-sc.method", "mtp"], "--speculative-config is given as an object, and by"),
        (["-sc.method", "ngram"], "num_speculative_tokens of speculative_config is missing"),
        (["--override-generation-config", '{"temprature": 1}'], "'temprature'"),
        (["--root-path", "llm/"], "'llm/'"),
    ],
)
def test_what_we_have_not_is_refused_by_name(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--port", "0", "--host", "192.0.2.1", *flags) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("ridgeline: ")
    assert said in printed
    assert len(printed.splitlines()) == 1


def test_vllms_variable_of_keys_is_read_and_others_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that its operator believes to be locked must not stand open."""
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.delenv("RIDGELINE_API_KEY", raising=False)
    verb = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    assert verb.make_context("serve", ["m"]).params["api_key"] == ["theirs"]
    assert capsys.readouterr().err == (
        "ridgeline: VLLM_USE_V1: no effect: settings are flags and never environment variables.\n"
    )
    monkeypatch.setenv("RIDGELINE_API_KEY", "ours")
    assert verb.make_context("serve", ["m"]).params["api_key"] == ["ours"]
    assert verb.make_context("serve", ["m", "--api-key", "flag"]).params["api_key"] == ["flag"]


# ---- migrate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "first", "code"),
    [
        ("vllm serve m --trust-remote-code", "ridgeline serve m --host 0.0.0.0", 0),
        ("python3 -m vllm.entrypoints.openai.api_server --model m --host h", "ridgeline serve m --host h", 0),
        ("CUDA_VISIBLE_DEVICES=0,1 VLLM_API_KEY=k VLLM_USE_V1=1 vllm serve m --uds 's ock'",
         "CUDA_VISIBLE_DEVICES=0,1 RIDGELINE_API_KEY=k ridgeline serve m --uds 's ock'", 0),
        ("docker run --gpus all -v a:/root -e HF_TOKEN=t -p 9000:8000 --ipc=host vllm/vllm-openai:v0.33 --model m",
         "HF_TOKEN=t ridgeline serve m --host 0.0.0.0 --port 9000", 0),
        ("vllm serve m \\\n --enable-prompt-adapter --frob 3 --port 1", "ridgeline serve m --port 1 --host 0.0.0.0", 1),
    ],
)  # fmt: skip
def test_migrate_prints_a_command_that_parses_and_every_difference(
    command: str, first: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "migrate", command) == code
    printed, *rest = capsys.readouterr().out.splitlines()
    assert printed == first
    for flag in (
        "--trust-remote-code",
        "--enable-prompt-adapter",
        "--frob",
        "VLLM_USE_V1",
        "-p 9000:8000",
        "--gpus all",
    ):
        assert (flag in command) is any(flag in line for line in rest), flag
    ours = shlex.split(printed)
    verb = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    verb.make_context("serve", ours[ours.index("serve") + 1 :])


@pytest.mark.parametrize(("value", "told"), [("bfloat16", True), ("fp8", False), ("auto", False), (None, False)])
def test_migrate_says_which_models_refuse_a_cache_of_other_16_bits(
    value: str | None, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is read, so the flag stays, and the line leaves the choice to who knows the model."""
    flag = f" --kv-cache-dtype {value}" if value else ""
    assert run(monkeypatch, "migrate", f"vllm serve m --host h{flag}") == 0
    printed, *rest = capsys.readouterr().out.splitlines()
    assert printed == f"ridgeline serve m --host h{flag}"
    lines = [line for line in rest if line.startswith("--kv-cache-dtype")]
    assert len(lines) == told
    assert all("latent attention" in line and "refuse it" in line for line in lines)


def test_migrate_tells_of_every_default_that_is_not_vllms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    assert run(monkeypatch, "migrate", "vllm serve m --host h") == 0
    plain = capsys.readouterr().out
    for name, words, text in DEFAULTS:
        assert f"--{name}" in plain, name
        assert text in plain
        if words:  # they parse, and say another thing than is done without them
            flag = f"--{name}"
            given = verb.make_context("serve", ["m", flag, words])
            without = verb.make_context("serve", ["m"])
            field = next(each.name for each in verb.params if flag in each.opts)
            assert given.params[field] != without.params[field], name
    assert run(monkeypatch, "migrate", "vllm serve m --host h --reasoning-parser qwen3 --tool-call-parser hermes") == 0
    told = capsys.readouterr().out
    assert "in vLLM it stays in the content" not in told
    assert "until it is told" not in told
    assert "--unknown-fields ignore" in told


@pytest.mark.parametrize("command", ["vllm bench serve", "docker run redis", "ls -l", "docker run"])
def test_migrate_says_what_it_reads(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "migrate", command) == 2
    assert capsys.readouterr().err.startswith("ridgeline: ")


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25_600),
        ("2M", 2 << 20),
        (" 7 ", 7),
        ("1g", 10**9),
        ("auto", None),
        ("-1", None),
    ],
)
def test_numbers_as_vllm_reads_them(text: str, number: int | None) -> None:
    assert count(text, "max_model_len") == number
    assert LLMConfig(max_model_len=text).max_model_len == number  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["25.6K", "8kk", "", "k", "1.2345k", "-5", "0x10", "1e3", "٣"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(InvalidConfig, match="max_model_len"):
        LLMConfig(max_model_len=text)  # type: ignore[arg-type]


def test_dtypes_have_vllms_other_names() -> None:
    assert [LLMConfig(dtype=name).dtype for name in ("half", "float")] == ["float16", "float32"]


def test_a_file_of_settings_takes_vllms_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nserved-model-name: [a, b]\nallowed-origins: '[\"*\"]'\nkv-cache-memory-bytes: 1G\n"
        "trust-remote-code: true\nenable-prompt-adapter: false\nmax-model-len: 8k\ndisable-cascade-attn: true\n"
    )
    assert read_file(file) == {
        "model": "m", "served_model_name": ["a", "b"], "allowed_origins": ["*"], "kv_cache_memory": "1G",
        "max_model_len": "8k", "cascade": False,
    }  # fmt: skip
    assert "trust_remote_code has no effect" in capsys.readouterr().err
    file.write_text("enable-prompt-adapter: true\n")
    with pytest.raises(InvalidConfig, match="enable_prompt_adapter is not supported"):
        read_file(file)


# ---- LLM() ------------------------------------------------------------------------------------------------------


def test_llm_takes_vllms_arguments_and_says_so(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(
        text_model, trust_remote_code=True, swap_space=0.1, disable_log_stats=True, enable_prompt_adapter=False,
        enforce_eager=True, disable_cascade_attn=True, max_model_len="64", dtype="float", max_logprobs=2,
        generation_config="vllm", override_generation_config={"temperature": 0.0, "max_new_tokens": 3},
    ) as llm:  # fmt: skip
        told = [record.message.split(" ")[0] for record in caplog.records]
        assert told == ["trust_remote_code", "disable_log_stats", "enable_prompt_adapter"]
        assert llm.config.cascade is False
        assert llm.config.kv_offloading_size == 0.1
        assert (llm.config.max_model_len, llm.config.dtype) == (64, "float32")
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens) == (0.0, 3)
        assert len(llm.generate("a b")[0].outputs[0].token_ids) <= 3
        with pytest.raises(InvalidRequest, match="logprobs is 3, and at most 2"):
            llm.generate("a b", params.replace(logprobs=3))


def test_llm_refuses_what_would_change_answers() -> None:
    with pytest.raises(InvalidConfig, match="enable_prompt_adapter is not supported"):
        LLM("x", enable_prompt_adapter=True)
    with pytest.raises(InvalidConfig, match="quantization_config"):
        LLM("x", hf_overrides={"quantization_config": {}})
    with pytest.raises(InvalidConfig, match="'top_q'"):
        LLM("x", override_generation_config={"top_q": 1})


def test_another_tokenizer_and_overrides_of_the_config(copy_of: Callable[[], Path], tmp_path: Path) -> None:
    folder = copy_of()
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with LLM(folder, tokenizer=other, hf_overrides={"max_position_embeddings": 48}) as llm:
        assert llm.engine.config.max_model_len == 48
        assert llm.get_tokenizer().encode("a b")
