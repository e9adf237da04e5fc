"""A process for a keeper, which gives signs of life as it is told. It stands in for an engine."""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from ridgeline.serving.processes.lifeline import end_with_parent, read_settings, tell_ready
from ridgeline.serving.processes.pulse import Pulse


class Script(msgspec.Struct):
    """stop: it stops itself once it is ready. step: seconds of its first step, for which it announces `bound`. spin: it
    computes all the time."""

    stop: bool = False
    step: float = 0.0
    bound: float = 0.0
    spin: bool = False


def main() -> None:
    pulse = Pulse.of(sys.argv)
    pulse.start(0.1)
    script = msgspec.json.decode(read_settings(), type=Script)
    end_with_parent()
    pulse.turn()
    tell_ready()
    if script.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    if script.step:
        pulse.turn(script.bound, "a step")
        time.sleep(script.step)
    while True:
        pulse.turn()
        if not script.spin:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
