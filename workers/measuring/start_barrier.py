"""Holds a rank back, after all its imports, until its devices are free.

Importing the engine takes longer than many measurements. So the next engine imports while another still
measures, and touches no device before the other engine has ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "OSTINATO_MEASURING_GATE"
POLL_S = 0.05


def wait() -> None:
    """Wait for the file that VARIABLE names. Without VARIABLE, do not wait."""
    if gate := os.environ.get(VARIABLE):
        while not Path(gate).exists():
            time.sleep(POLL_S)
