"""Holds a rank back, with everything imported, until its devices are free.

Importing the engine takes each of its processes longer than many a measurement: the next engine does it while
another still measures, and touches no device before that one has ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "OSTINATO_MEASURING_GATE"
POLL_S = 0.05


def wait() -> None:
    """Until the file that VARIABLE names is there; not at all without VARIABLE."""
    if gate := os.environ.get(VARIABLE):
        while not Path(gate).exists():
            time.sleep(POLL_S)
