"""Smaller `priority` first, first come first served within one priority."""

from ridgeline.core.request import Request


class Priority:
    preempts = True

    def order(self, request: Request, arrival_index: int) -> tuple:
        return (request.priority, arrival_index)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority
