"""First come, first served."""

from ridgeline.core.request import Request


class FCFS:
    def order(self, request: Request, arrival_index: int) -> tuple:
        return (arrival_index,)
