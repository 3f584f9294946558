"""What our code logs in a replica goes to the replica's own file, line by line.

Ray Serve keeps a replica's standard error to write it later, many lines at once. A warning of a quiet
process would be read by nobody, and lost when it dies. So our loggers write past that, into the process's
`.err` file, where `ostinato logs` and the Ray dashboard look.
"""

from __future__ import annotations

import logging
import sys

from controlplane.printable import printable

PACKAGES = ("controlplane", "placement", "profiler", "workers")
LINE = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class PrintableFormatter(logging.Formatter):
    """Whoever reads a log may do so on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_at_once() -> None:
    """Called from a deployment's constructor."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(PrintableFormatter(LINE))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
