"""First come, first served. Work in the background, which nobody waits for, gives way to all other."""

from ridgeline.core.request import Request


class FCFS:
    def __init__(self) -> None:
        self.preempts = False  # until there is work in the background

    def order(self, request: Request, arrival_index: int) -> tuple:
        self.preempts |= request.background
        return (request.background, arrival_index)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return running.background and not waiting.background
