"""Ridgeline's server as a Ray Serve application: each replica is an engine on its GPU with an API server before it.

    pip install 'ridgeline[serve]' 'ray[serve]'
    serve run deploy.ray_serve:application model=Qwen/Qwen3-0.6B max_replicas=4

Arguments are the settings of `ridgeline serve`, by their names in YAML, and `OWN`. Keys may come from
RIDGELINE_API_KEY and RIDGELINE_ADMIN_KEY. Ray listens and balances, so host and port mean nothing here; /metrics and
/v1/requests/{id} are those of the replica that happens to answer.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import fields
from typing import Any

import yaml
from ray import serve
from ray.serve import Application

from ridgeline.cli.serve import ENGINE_FIELDS, ENVIRONMENT, config_of, one_model
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.processes.hosted import HostedServer

# max_replicas: 0 for as many as replicas. gpus, cpus: of each. target: open requests beyond which another is added.
OWN = {"replicas": 1, "max_replicas": 0, "gpus": 1, "cpus": 1, "target": 64}


@serve.deployment
@serve.ingress()
class Replica:
    """Lives in one process of Ray's, the engine in another, which dies with it."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._server = HostedServer(*one_model(config), f"ray-{uuid.uuid4().hex[:12]}")
        await self._server.start()

    def __serve_build_asgi_app__(self) -> Any:
        return wrap(create_app(self._server.api), self._server.api)

    def check_health(self) -> None:
        """Ray replaces a replica that fails this three times. An engine that died or hangs is started again
        meanwhile."""
        self._server.raise_what_ended()

    async def __del__(self) -> None:
        self._server.kill()


def application(given: dict[str, Any]) -> Application:
    """What `serve run` deploys. Raise InvalidConfig for settings that cannot be."""
    settings = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in given.items()}
    own = {name: settings.pop(name, default) for name, default in OWN.items()}
    for name, variables in ENVIRONMENT.items():
        for variable in variables:
            if variable in os.environ:
                several = isinstance(getattr(ServeConfig, name), tuple)
                settings.setdefault(name, os.environ[variable].split() if several else os.environ[variable])
    if unknown := settings.keys() - ENGINE_FIELDS - {field.name for field in fields(ServeConfig)}:
        raise InvalidConfig(f"no setting of the server, nor of Ray's: {', '.join(sorted(unknown))}.")
    for name, value in settings.items():
        if isinstance(value, str) and isinstance(getattr(ServeConfig, name, None), tuple):
            settings[name] = [value]
    config, _ = config_of(settings, source="serve run")
    if config.data_parallel_size > 1:
        raise InvalidConfig("Ray keeps the replicas; give replicas=N in place of data_parallel_size.")
    scaling: dict[str, Any] = {"num_replicas": own["replicas"]}
    if own["max_replicas"]:
        bounds = {"min_replicas": own["replicas"], "max_replicas": own["max_replicas"]}
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": own["target"]}}
    replica = Replica.options(  # type: ignore[attr-defined]  # Ray's decorators have no types
        **scaling,
        ray_actor_options={"num_gpus": own["gpus"], "num_cpus": own["cpus"]},
        max_ongoing_requests=config.max_queue_requests or 1 << 20,  # what is above gets our 429, not Ray's queue
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    return replica.bind(config)
