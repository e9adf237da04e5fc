"""`ridgeline route`: one address before several servers."""

from __future__ import annotations

from typing import Any

from ridgeline.cli.options import option, signed
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.routing import RouteConfig
from ridgeline.routing import rule_of

ROUTE_HELP = {
    "worker_urls": "Servers that requests go to, as http://HOST:PORT or https://HOST:PORT.",
    "policy": "Rule that chooses a server: prefix, least, round-robin, random or session; sglang-router's cache_aware, "
    "power_of_two and round_robin are taken too.",
    "kv_events": "Addresses of the servers' KV events, as tcp://HOST:PORT or tcp://HOST:PORT,REPLAYS, one for "
    "each in the same order.",
    "host": "Address to listen on; 0.0.0.0 for all addresses of this machine.",
    "port": "Port to listen on (0: any that is free).",
    "session_header": "Header that names a request's session.",
    "worker_api_key": "Key with which the router asks the servers for their models.",
    "admin_key": "Key for the router's /metrics (default: none is asked for).",
    "health_interval": "Seconds between two looks at a server.",
    "health_timeout": "Seconds that a server has to answer such a look.",
    "hung_timeout": "Seconds after which the requests of a server that answers no look are ended.",
    "max_body_bytes": "Longest body of a request.",
    "max_buffered_bytes": "Bytes that all open requests together may hold in the router.",
    "max_connections_per_client": "Connections that one address may have open (0: no limit).",
    "shutdown_timeout": "Seconds for running requests to finish when the router ends.",
    "ssl_keyfile": "Key of the certificate for HTTPS with clients.",
    "ssl_certfile": "Certificate for HTTPS with clients.",
    "ssl_keyfile_password": "Password of the key.",
    "worker_ca_certs": "File of certificates that those of https servers must be signed by (default: the system's).",
    "log_level": "debug, info, warning or error.",
    "log_json": "Log JSON objects, one a line.",
    "access_log": "Log each request.",
}
ENVIRONMENT = {"admin_key": ["RIDGELINE_ADMIN_KEY"], "worker_api_key": ["RIDGELINE_WORKER_API_KEY"]}


def _route(**given: Any) -> None:
    """Route requests to several servers over HTTP, until SIGTERM or Ctrl+C."""
    values = {name: value for name, value in given.items() if value not in (None, [])}
    for name in ("worker_urls", "kv_events"):
        values[name] = tuple(given[name] or ())
    config = RouteConfig(**values)
    rule_of(config.policy)  # complains about an unknown one
    try:
        from ridgeline.serving.router.run import run
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"the router needs the package {error.name}; pip install 'ridgeline[serve]'.") from error
    run(config)


def _options() -> list[Any]:
    return [
        option(RouteConfig, name, text, "Router", unset=True, envvar=ENVIRONMENT.get(name))
        for name, text in ROUTE_HELP.items()
    ]


route = signed(_route, _options())
