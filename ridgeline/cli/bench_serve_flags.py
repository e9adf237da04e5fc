"""The options of `ridgeline bench serve`, as records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class ServerFlags:
    """The servers to measure: one that runs, or those to start."""

    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000"
    start: Annotated[
        list[str] | None,
        typer.Option(
            help="Start a server here and measure it: ridgeline or vllm, followed by its flags; several run in turn."
        ),
    ] = None
    model: Annotated[
        str, typer.Option(help="Default: the first of /v1/models. With --start: folder or hub id (default: embedded).")
    ] = ""
    dummy: Annotated[bool, typer.Option("--dummy", help="With --start: random weights; config.json is enough.")] = False
    peer_path: Annotated[Path | None, typer.Option(help="Folder put first on vLLM's module path.")] = None
    peer_python: Annotated[str, typer.Option(help="vLLM's Python, if it lives in its own environment.")] = ""
    logs: Annotated[Path | None, typer.Option(help="Folder for the logs of servers started here.")] = None
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a server started here may need.")] = 600.0
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")] = ""
    vocab_size: Annotated[
        int, typer.Option(min=0, help="Random ids are below this (default: what the server says).")
    ] = 0


@dataclass(frozen=True)
class LoadFlags:
    """The requests, and when they leave."""

    rate: Annotated[str, typer.Option(help="Requests a second; 1,2,4 for a curve; inf: all at once.")] = ""
    burstiness: Annotated[float, typer.Option(help="Burstiness of arrivals: 1 Poisson, below burstier, inf even.")] = (
        1.0
    )
    num_requests: Annotated[
        int, typer.Option(min=0, help="Requests of each rate (default: 200, or as many as --duration takes).")
    ] = 0
    duration: Annotated[float, typer.Option(min=0, help="Seconds in which requests of a rate leave.")] = 0.0
    input_len: Annotated[str, typer.Option(help="Tokens: N, LOW:HIGH, or MEAN,DEVIATION[,MAX] (lognormal).")] = "512"
    output_len: Annotated[str, typer.Option(help="Tokens, in the same forms.")] = "128"
    trace: Annotated[Path | None, typer.Option(help="JSON lines: timestamp, lengths or prompt of requests.")] = None
    shared_prefix: Annotated[
        str, typer.Option(help="TOKENS[,GROUPS]: tokens that requests begin with, in groups that share them.")
    ] = ""
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0


@dataclass(frozen=True)
class AgentFlags:
    """Sessions of agents (W6), in place of other requests."""

    agents: Annotated[
        int, typer.Option(min=0, help="W6 instead: so many sessions of agents; --rate is that of sessions.")
    ] = 0
    turns: Annotated[int, typer.Option(min=1, help="Turns of an agent's session.")] = 43
    time_scale: Annotated[float, typer.Option(help="Factor on the time that agents' tools take.")] = 1.0
    agent_sizes: Annotated[
        str, typer.Option(help="Tokens of agents: INSTRUCTIONS,TASK,RESULT,ANSWER (default: 12000,2000,2590,444).")
    ] = ""
    price_per_hour: Annotated[float | None, typer.Option(help="With --agents: price of the server for an hour.")] = None


@dataclass(frozen=True)
class BodyFlags:
    """The body of a request."""

    endpoint: Annotated[
        str, typer.Option(help="completions (token ids), chat (words), or generate (words, Triton's).")
    ] = "completions"
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of sampling.")] = 0.0
    ignore_eos: Annotated[bool, typer.Option(help="Answers have exactly the length asked for.")] = True
    extra: Annotated[str, typer.Option(help="JSON object of further body fields; null removes one of ours.")] = ""


@dataclass(frozen=True)
class ClientFlags:
    """The clients that send requests, and their limits."""

    slo: Annotated[str, typer.Option(help="ttft=200,itl=20,tpot=…,e2e=… in ms: goodput counts what meets all.")] = ""
    search_slo: Annotated[
        str,
        typer.Option(
            help="Find the highest rate at which 99 % of the requests meet such bounds, by bisection from --rate "
            "(default: 1) on; rates above one that misses are taken to miss too."
        ),
    ] = ""
    max_concurrency: Annotated[int, typer.Option(min=0, help="Requests open at once; 0: as many as there are.")] = 0
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a request may take.")] = 600.0
    within: Annotated[
        float, typer.Option(min=0, help="Seconds for the whole run; rates that do not fit are left out (0: no limit).")
    ] = 0.0
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first, one by one, and not counted.")] = 2
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send requests.")] = 1


@dataclass(frozen=True)
class ReportFlags:
    """The forms of the results."""

    out: Annotated[Path | None, typer.Option(help="Results are appended to this file, rate by rate.")] = None
    plot: Annotated[Path | None, typer.Option(help="Picture of the curves (.svg; .png needs matplotlib).")] = None
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False
    commit: Annotated[str, typer.Option(help="Recorded with the results; default: what git says.")] = ""
