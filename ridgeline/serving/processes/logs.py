"""The logs of the server's processes on standard error: one line or one JSON object for each message."""

from __future__ import annotations

import json
import logging
import sys
import time

PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A formatter that writes JSON. What is given as `extra=` becomes fields, such as request_id."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._of = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = {
            "time": when,
            **self._of,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in record.__dict__.items() if name not in PLAIN}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up_logging(*, as_json: bool, level: str = "info", process: str = "") -> None:
    """Send this process's messages to standard error. `process` is its name, where several say the same."""
    handler = logging.StreamHandler(sys.stderr)
    before = f"[{process}] " if process else ""
    plain = logging.Formatter(f"%(asctime)s %(levelname)s {before}%(name)s: %(message)s")
    handler.setFormatter(JsonLines(process) if as_json else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
