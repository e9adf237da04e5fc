"""The options of `ridgeline simulate`, as records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class TrafficFlags:
    """The requests, and when they come."""

    rate: Annotated[
        str, typer.Option(help="Requests (or sessions) a second; 1,2,4 for several runs; inf: at once.")
    ] = "1"
    requests: Annotated[int, typer.Option(min=0, help="Requests of each run (default: 1000, or all of a trace).")] = 0
    duration: Annotated[float, typer.Option(min=0, help="Seconds in which requests come.")] = 0.0
    burstiness: Annotated[float, typer.Option(help="Burstiness: 1 Poisson, below burstier (gamma), inf even.")] = 1.0
    input_len: Annotated[str, typer.Option(help="Tokens: N, LOW:HIGH, or MEAN,DEVIATION[,MAX] (lognormal).")] = "512"
    output_len: Annotated[str, typer.Option(help="Tokens, in the same forms.")] = "128"
    shared_prefix: Annotated[
        str, typer.Option(help="TOKENS[,GROUPS]: tokens that requests begin with, in groups that share them.")
    ] = ""
    tenants: Annotated[
        str, typer.Option(help="NAME:SHARE[:PRIORITY],…: whose requests they are; smaller priorities run first.")
    ] = ""
    trace: Annotated[Path | None, typer.Option(help="Requests from a file: Mooncake's JSON lines, Azure's CSV.")] = None
    agents: Annotated[int, typer.Option(min=0, help="W6 instead: so many sessions of agents.")] = 0
    turns: Annotated[int, typer.Option(min=1, help="Turns of an agent's session.")] = 43
    agent_sizes: Annotated[
        str, typer.Option(help="Tokens of agents: INSTRUCTIONS,TASK,RESULT,ANSWER (default: 12000,2000,2590,444).")
    ] = ""
    time_scale: Annotated[float, typer.Option(help="Factor on a trace's times, or on what agents' tools take.")] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0


@dataclass(frozen=True)
class FleetFlags:
    """The replicas and what becomes of them."""

    replicas: Annotated[int, typer.Option(help="Replicas of the model, one device each.")] = 1
    prefill_replicas: Annotated[int, typer.Option(min=0, help="Replicas that run prompts alone.")] = 0
    decode_replicas: Annotated[int, typer.Option(min=0, help="Replicas that then write the answers.")] = 0
    handover_rate: Annotated[
        float, typer.Option(help="GB/s in which one that runs prompts sends keys and values to those that answer.")
    ] = 50.0
    routing: Annotated[str, typer.Option(help="prefix, least, round-robin, random or session.")] = "prefix"
    fail: Annotated[list[str] | None, typer.Option(help="REPLICA@SECONDS:AWAY: it stops, and is back later.")] = None
    autoscale: Annotated[
        str, typer.Option(help="LEAST:REQUESTS[:START]: replicas come and go, one for so many open requests.")
    ] = ""
    price_per_hour: Annotated[float | None, typer.Option(help="Price of a replica for an hour, in any currency.")] = (
        None
    )


@dataclass(frozen=True)
class EngineFlags:
    """The settings of each replica. What is left out is as `ridgeline serve` would choose it."""

    policy: Annotated[str, typer.Option(help="Scheduling policy, or several to compare: fcfs,priority.")] = "fcfs"
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests at once.")] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step.")] = None
    itl_target: Annotated[float | None, typer.Option(help="Bound on a step with prompts, in ms; 0: none.")] = None
    prefix_caching: Annotated[bool, typer.Option(help="Whether prompts share cached beginnings.")] = True
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that the cache holds (default: what fits).")] = None
    kv_offloading_size: Annotated[
        float, typer.Option(help="GiB of the host's memory for cache blocks that the device has no room for.")
    ] = 0.0
    kv_disk_size: Annotated[float, typer.Option(help="GiB of a disk below that memory, of each replica.")] = 0.0
    kv_disk_rate: Annotated[float, typer.Option(help="GB/s of that disk, of reads and of writes.")] = 0.7
    kv_disk_shared: Annotated[bool, typer.Option(help="All replicas have one such disk, as a central store.")] = False
    utilization: Annotated[float, typer.Option(help="Share of the device's memory to use.")] = 0.9
    lag: Annotated[float, typer.Option(help="Milliseconds between client and engine, both ways together.")] = 2.0
