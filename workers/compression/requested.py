"""From a request to an artefact: the one place that knows both what was asked for and what does it."""

from __future__ import annotations

import time

from workers.compression import choose, job
from workers.compression.lines import Artifact, Quality
from workers.compression.request import CompressRequest, Recipe
from workers.compression.types import Progress
