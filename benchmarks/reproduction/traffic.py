"""Requests for several models: Azure's traces thinned as MaverIQ did, or Poisson arrivals whose rate changes.

The paper scales the traces by 0.1 to 0.4 and counts 861 to 7,722 requests, which are these shares of theirs:
each request stays with this chance. Its prompts are at most 512 tokens long, and models equally likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from controlplane.simulation.traces import Trace, read
from controlplane.simulation.world import new_asked
from profiler.compiled import Records

LONGEST_PROMPT = 512
TRACES = {
    "code": "AzureLLMInferenceTrace_code.csv",
    "conversation": "AzureLLMInferenceTrace_conv.csv",
}


@dataclass(frozen=True)
class Traffic:
    """`asked` [N] in the order of arrival, `models` [N] which of the models, until `until_s`."""

    asked: Records
    models: npt.NDArray[np.int64]
    until_s: float

    @property
    def rate_per_s(self) -> float:
        return len(self.asked) / self.until_s


def trace(folder: Path, name: str) -> Trace:
    """Raises ScenarioError where the file is not in `folder`."""
    return read(folder / TRACES[name])


def thinned(whole: Trace, share: float, models: int, seed: int) -> Traffic:
    """Another share keeps some of the same requests, and each asks the same model."""
    rng = np.random.default_rng((seed, 3))
    count = len(whole.arrival_s)
    kept, asks = rng.random(count) < share, rng.integers(models, size=count)
    prompts = np.minimum(whole.prompt, LONGEST_PROMPT)
    return _asked(whole.arrival_s[kept], prompts[kept], whole.output[kept], asks[kept], whole.arrival_s[-1])


def fluctuating(rates: Sequence[float], period_s: float, output_tokens: int, seed: int) -> Traffic:
    """Poisson arrivals at each of `rates` for a period; in period k any of k + 1 models is asked."""
    rng = np.random.default_rng((seed, 4))
    counts = rng.poisson(np.array(rates) * period_s)
    period = np.repeat(np.arange(len(rates)), counts)
    arrival_s = np.sort((period + rng.random(len(period))) * period_s)
    asks = rng.integers(period + 1)
    prompts = np.full(len(period), LONGEST_PROMPT)
    outputs = np.full(len(period), output_tokens)
    return _asked(arrival_s, prompts, outputs, asks, len(rates) * period_s)


Ints = npt.NDArray[np.int64]


def _asked(
    arrival_s: npt.NDArray[np.float64], prompts: Ints, outputs: Ints, models: Ints, until_s: float
) -> Traffic:
    asked = new_asked(len(arrival_s))
    asked.arrival_s, asked.prompt, asked.output = arrival_s, prompts, outputs
    asked.expected = outputs
    asked.ttft_s = asked.tpot_s = np.inf
    return Traffic(asked, models, float(until_s))
