"""First come, first served."""

from ridgeline.core.request import Request


class FCFS:
    preempts = False

    def order(self, request: Request, arrival_index: int) -> tuple:
        return (arrival_index,)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return False
