"""Rollouts of a server: answers that `ridgeline serve` draws, in processes and on devices of its own.

The policy's weights are sent into it between batches (`weight_sender`), and answers come as tokens and their
log-probabilities over the completions' route. Every answer must be of the weights that were sent last: what else
changes the server's weights ends the run.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import torch

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline.core.specs.model import WeightMap
from ridgeline.layers.decoder import Decoder
from ridgeline.training.rollouts import Rollout, RolloutBatch, RolloutConfig, seed_of
from ridgeline.training.weight_sender import WeightSender
from ridgeline.weights.loader import export_checkpoint

AT_ONCE = 64  # requests under way: one for each prompt
LIMIT = 1800.0  # seconds for the answers to one prompt


class RolloutServerFailed(RidgelineError):
    """The server that draws answers is not there, refuses, or answers by other weights."""


class ServedRollouts:
    """A server that draws answers. version: how many updates its weights have had, or -1: none were sent yet.

    url, key: of the server, and its admin key. weights: the model's, by which parameters have the checkpoint's names.
    Raise InvalidConfig for what is no address, RolloutServerFailed if no server is there, and NotObeyed and
    TransferFailed if it takes no weights.
    """

    def __init__(self, url: str, key: str, weights: WeightMap, device: torch.device, config: RolloutConfig) -> None:
        self.config, self.version = config, -1
        self._url, self._key, self._weights = url.rstrip("/"), key, weights
        self._run = token_hex(4)  # names this run's weights, which a server must not take for another's
        if not _is_address(url):
            raise InvalidConfig(
                f"the server that draws answers needs an address such as http://HOST:8000, got {url!r}."
            )
        with self._reached():
            self._sender = WeightSender(url, key, device=device)
        self._threads = ThreadPoolExecutor(min(AT_ONCE, config.prompts), "answers")

    def push(self, policy: Decoder, version: int) -> float:
        """Send the policy's weights: all at first, then those that learn. Nothing may be under way. Return the seconds
        that it took. Raise NotObeyed and TransferFailed."""
        started = time.monotonic()
        sent = {
            name: sources
            for name, sources in self._weights.items()
            if self.version < 0 or policy.get_parameter(name).requires_grad
        }
        with self._reached():
            self._sender.send(export_checkpoint(policy, sent), self._named(version))
        self.version = version
        return time.monotonic() - started

    def draw(self, step: int, chosen: Sequence[int], prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        """Draw the answers of a step. chosen: the places of its prompts, whose tokens `prompts` has. Raise
        RolloutServerFailed."""
        started, version = time.monotonic(), self.version
        seeds = [seed_of(self.config.seed, step, place) for place in range(len(chosen))]
        answers = tuple(self._threads.map(partial(self._answers, self._named(version)), prompts, seeds))
        return RolloutBatch(step, version, tuple(chosen), answers, time.monotonic() - started)

    def close(self) -> None:
        """Leave the server, which goes on."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._sender.close()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RolloutServerFailed(f"the server at {self._url} cannot be reached ({error}).") from error

    def _named(self, version: int) -> str:
        return f"{self._run}-{version}"

    def _answers(self, version: str, prompt: Sequence[int], seed: int) -> tuple[Rollout, ...]:
        body = {
            "prompt": list(prompt), "n": self.config.samples, "max_tokens": self.config.max_tokens, "seed": seed,
            "temperature": self.config.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True, "return_weight_versions": True,
        }  # fmt: skip
        found = sorted(self._posted(body)["choices"], key=lambda choice: choice["index"])
        seen = {str(span["version"]) for choice in found for span in choice["weight_versions"]}
        if seen - {version}:
            raise RolloutServerFailed(
                f"{self._url} answered by weights {', '.join(sorted(seen))} and not by those that training sent, "
                f"{version}; let nothing else change its weights, and run the same command again."
            )
        return tuple(
            Rollout(
                tuple(each["token_ids"]), tuple(each["logprobs"]["token_logprobs"]), each["finish_reason"] != "length"
            )
            for each in found
        )

    def _posted(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            text = error.read(1 << 16).decode(errors="replace")
            raise RolloutServerFailed(f"{self._url} refused to draw answers ({error.code}): {text}") from None
        except (OSError, ValueError, HTTPException) as error:
            raise RolloutServerFailed(f"{self._url} draws no answers any more ({error}).") from error


def _is_address(url: str) -> bool:
    try:
        found = urlsplit(url)
        found.port  # noqa: B018  # which is read here
        return found.scheme in ("http", "https") and bool((found.hostname or "").encode("idna")) and url.isprintable()
    except ValueError:
        return False
