"""`ridgeline run-batch`: run a file of requests, as the batches of a server, without one that faces a network."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from ridgeline.cli.serve import ServeCommand, prepare, read_file, with_options
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.core.settings.vllm_flags import Takes

if TYPE_CHECKING:
    from ridgeline.serving.batches.offline import OfflineBatch

# What has no meaning where no client can come.
NETWORK = ("host", "port", "uds", "grpc_port", "api_server_count", "batch_dir", "ssl_keyfile", "ssl_certfile")
DEFAULTS = {"batch_in_flight": 1024, "itl_target": 0, "access_log": False, "log_level": "warning"}
LOOK = 0.2  # seconds between looks if the batch is done
TOLD = 10.0  # seconds between two lines about the progress
INTERRUPTED = 130


class RunBatchCommand(ServeCommand):
    """The verb with vLLM's ways to write its command line."""

    more: ClassVar = {"input-file": Takes.VALUE, "output-file": Takes.VALUE}
    short: ClassVar = {"-i": "--input-file", "-o": "--output-file"}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [self.short.get(word, word) for word in args])


@with_options
def run_batch(
    model: str = typer.Argument(
        None, help="Model folder or Hugging Face hub id; the embedded model when none is given."
    ),
    input_file: Path = typer.Option(..., "--input-file", "-i", help="File of requests, as OpenAI's batches have them."),
    output_file: Path = typer.Option(..., "--output-file", "-o", help="File for the answers, in the same order."),
    config: Path = typer.Option(None, help="YAML file with settings; options given here win over it."),
    *,
    given: dict[str, Any],
) -> None:
    """Run a file of requests. Run again, the same command goes on where it was ended."""
    settings = read_file(config) if config is not None else {}
    settings |= given if model is None else {**given, "model": model}
    for name in NETWORK:
        if settings.get(name) is not None:
            raise InvalidConfig(f"{name} has no meaning here: no client can come; leave it out.")
    from ridgeline.serving.batches.offline import OfflineBatch

    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        longest = int(settings.get("max_body_bytes", ServeConfig.max_body_bytes))
        batch = OfflineBatch(input_file, output_file, longest)
        private = {"uds": f"{folder}/socket", "batch_dir": str(batch.folder)}
        supervisor = prepare({**DEFAULTS, **settings, **private}, source=str(config))
        supervisor.quiet = True
        if not batch.begin(supervisor.names):
            threading.Thread(target=_watch, args=(batch,), daemon=True).start()
            code = supervisor.run()
            if not batch.state().final:
                print(f"ridgeline: the same command goes on from here ({batch.folder}).", file=sys.stderr)
                raise typer.Exit(code or INTERRUPTED)
    ended = batch.finish()
    counts = ended.request_counts
    print(f"{counts.completed} of {counts.total} requests have answers: {output_file}", file=sys.stderr)
    raise typer.Exit(0 if ended.status == "completed" else 1)


def _watch(batch: OfflineBatch) -> None:
    """Tell of the progress, and end the server of this process when the batch is done."""
    told = time.monotonic()
    while not (state := batch.state()).final:
        if time.monotonic() - told > TOLD:
            told = time.monotonic()
            counts = state.request_counts
            print(f"ridgeline: {counts.completed + counts.failed} of {counts.total} requests", file=sys.stderr)
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)
