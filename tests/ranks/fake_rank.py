"""A rank that computes nothing, and treats its leader as $FAKE_RANK says. It stands in for `ridgeline.rank_process`."""

from __future__ import annotations

import os
import socket
import sys
import time
from functools import partial

from ridgeline.core.plan.step import StepResult
from ridgeline.ranks.channel import Channel, Closed
from ridgeline.ranks.messages import (
    Alive,
    Begin,
    Done,
    Ready,
    SentMasks,
    SentPlan,
    Stop,
    decode_from_leader,
    encode,
)

READY = Ready("float32", "", "", 0, 0, 0, 2, 4, 64, 4, 32, False, False)
STEP = 0.6  # seconds
OUT_OF_MEMORY = partial(StepResult, error="OutOfMemoryError: out of memory", out_of_memory=True)


class FakeRank:
    """A rank of which only the wrong that it does is there."""

    def __init__(self, descriptor: int, fault: str) -> None:
        self.channel, self.fault, self.number = Channel(socket.socket(fileno=descriptor), None), fault, -1

    def run(self) -> None:
        """Answer until the leader says stop."""
        if self.fault == "starts late":
            time.sleep(3.0)
        while True:
            frame = self.channel.receive(None)
            assert frame is not None
            match message := decode_from_leader(frame):
                case Begin():
                    self.number = message.rank
                    self.channel.send(encode(READY))
                case SentPlan():
                    self.compute(message.id)
                case SentMasks() if self.fault == "waits for masks":
                    time.sleep(STEP)
                    self.tell(StepResult(message.plan_id))
                case Stop():
                    return
                case _:
                    pass
            self.channel.send(encode(Alive()))

    def compute(self, plan: int) -> None:
        match self.fault:
            case "slow":
                time.sleep(STEP)
            case "garbage" if self.number == 1:
                self.channel.send(b"\xc1 no message")
            case "truncated" if self.number == 1:
                self.channel._socket.send(b"\x40\0\0\0\0\0\0\0half")
                sys.exit(3)
            case "huge" if self.number == 1:
                self.channel._socket.send(b"\xff" * 8)
            case "waits for masks":
                return
            case "one has no memory" if self.number == 1:
                self.tell(OUT_OF_MEMORY(plan))
                return
            case "none has memory":
                self.tell(OUT_OF_MEMORY(plan))
                return
            case "fails the second, one rank late":
                if plan == 1 and self.number == 1:  # its first result is on the way as well
                    time.sleep(STEP)
                    self.tell(StepResult(0))
                    time.sleep(STEP)
                if plan == 0 and self.number == 1:
                    return
                if plan:
                    self.tell(StepResult(plan, error="wrong") if plan == 1 else StepResult(plan, dropped=True))
                    return
        self.tell(StepResult(plan))

    def tell(self, result: StepResult) -> None:
        self.channel.send(encode(Done(result)))


if __name__ == "__main__":
    try:
        FakeRank(int(sys.argv[1]), os.environ["FAKE_RANK"]).run()
    except Closed:
        sys.exit(1)
