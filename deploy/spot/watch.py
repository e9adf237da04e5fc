"""Run a server on a spot machine, and drain it when the cloud says that it takes the machine back.

    python deploy/spot/watch.py aws -- ridgeline serve MODEL --shutdown-timeout 90

The notice becomes SIGTERM, which drains: running requests finish, and new ones get 503 with Retry-After, so that a
balancer or a client asks another server. `--shutdown-timeout` is what the notice leaves after 20 s for the server's
processes to end: see `NOTICE`. Kubernetes needs none of this: there a node's drain sends SIGTERM to its pods.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

NOTICE = {"aws": 120, "gcp": 30, "azure": 30}  # seconds from the notice to the end, as the clouds document them
METADATA = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
PERIOD = 2.0  # seconds between two looks
PATIENCE = 5.0  # seconds for an answer
TOKEN_LIFE = 60  # seconds
# The metadata service answers on the machine's own link only, and a proxy would ask for the metadata of its machine.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, method: str = "GET", **headers: str) -> str | None:
    """Return the text of an answer, or None without one: nothing is announced, or nobody answers."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=names)
    try:
        with DIRECTLY.open(request, timeout=PATIENCE) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:
        if not (isinstance(error, urllib.error.HTTPError) and error.code == 404):
            print(f"watch: {url} did not answer ({error}); it is asked again.", file=sys.stderr)
        return None


def aws(base: str) -> bool:
    """Instance metadata v2 has `spot/instance-action` from the notice on, and 404 before."""
    token = ask(f"{base}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds=str(TOKEN_LIFE))
    path = f"{base}/latest/meta-data/spot/instance-action"
    return token is not None and ask(path, X_aws_ec2_metadata_token=token) is not None


def gcp(base: str) -> bool:
    return ask(f"{base}/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google") == "TRUE"


def azure(base: str) -> bool:
    told = ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    try:
        return any(event["EventType"] == "Preempt" for event in json.loads(told or "{}").get("Events", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"watch: scheduled events could not be read ({error}); they are asked for again.", file=sys.stderr)
        return False


CLOUDS: dict[str, Callable[[str], bool]] = {"aws": aws, "gcp": gcp, "azure": azure}


class Drain:
    """A server's drain. A second SIGTERM would end its requests at once, so the notice and the first SIGTERM from
    outside are one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._announced = process, False

    def begin(self) -> None:
        self._announced = True
        self._process.send_signal(signal.SIGTERM)

    def pass_on(self, number: int, _: object) -> None:
        if number == signal.SIGTERM and self._announced:
            self._announced = False  # the next one is meant
            return
        self._process.send_signal(number)


def watch(drain: Drain, announced: Callable[[], bool], ended: threading.Event) -> None:
    """Begin the drain once, when the end is announced. Return then, or after `ended` is set."""
    while not ended.is_set():
        if announced():
            print("watch: the cloud takes this machine back; the server drains.", file=sys.stderr, flush=True)
            drain.begin()
            return
        ended.wait(PERIOD)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drain a server when its spot machine is taken back.")
    parser.add_argument("cloud", choices=sorted(CLOUDS))
    parser.add_argument("--metadata", help="address of the cloud's metadata service")
    parser.add_argument("command", nargs="+", help="the server's command, after --")
    given = parser.parse_args()
    try:
        process = subprocess.Popen(given.command)
    except OSError as error:
        print(f"watch: {given.command[0]} cannot be started ({error}); name a command behind --.", file=sys.stderr)
        return 2
    drain = Drain(process)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain.pass_on)
    ended, base = threading.Event(), given.metadata or METADATA[given.cloud]
    threading.Thread(target=watch, args=(drain, lambda: CLOUDS[given.cloud](base), ended), daemon=True).start()
    code = process.wait()
    ended.set()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
