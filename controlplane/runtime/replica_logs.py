"""Our code's log lines in a replica go to the replica's own file, line by line.

Ray Serve buffers a replica's standard error and writes many lines at once. A quiet process's warning would
stay unread, and be lost when the process dies. So our loggers bypass that buffer and write to the process's
`.err` file, which `ostinato logs` and the Ray dashboard read.
"""

from __future__ import annotations

import logging
import sys

from controlplane.printable import printable

PACKAGES = ("controlplane", "placement", "profiler", "workers")
LINE = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class PrintableFormatter(logging.Formatter):
    """A formatter that is safe for terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_at_once() -> None:
    """Log line by line from now on. Called from a deployment's constructor."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(PrintableFormatter(LINE))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
