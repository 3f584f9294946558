"""Requests as data: when, for which variant, how long. Pure functions of seeds and files' texts.

Variants are numbered from 1; 0 is the base.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHARACTERS_PER_TOKEN = 4  # of English, about, in Llama's vocabulary: there is no tokenizer to count with
ZIPF = 1.5
CASE = re.compile(
    r"(?P<kind>azure|offline|zipf|uniform)@(?P<rate>\d+(?:\.\d+)?)"
    r"(?::cv=(?P<cv>\d+(?:\.\d+)?))?(?::seed=(?P<seed>\d+))?"
)

Lengths = Sequence[tuple[int, int]]  # (prompt tokens, output tokens)


@dataclass(frozen=True)
class Request:
    """`at_s` seconds after the start, `variant` is asked for exactly `output_tokens` tokens."""

    at_s: float
    variant: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Case:
    """`azure@1.0` is DeltaZip's trace of that rate; `zipf@4` and `uniform@4` are synthetic, Poisson unless
    followed by `:cv=` and the coefficient of variation of Gamma arrivals; `:seed=` is of this case alone.
    `offline@320` is that many requests at once, of variants alike."""

    name: str
    kind: str
    rate: float
    cv: float = 1.0
    seed: int | None = None

    @property
    def rated(self) -> bool:
        """Whether its requests arrive at random, at its rate."""
        return self.kind in ("zipf", "uniform")


def parse_case(name: str) -> Case:
    """Raises ValueError."""
    found = CASE.fullmatch(name)
    if found is None or _meaningless(found):
        raise ValueError(
            f"expected a case such as azure@1.0, zipf@4, uniform@4:cv=3, uniform@4:seed=2 or offline@320,"
            f" got {name!r}"
        )
    seed = int(found["seed"]) if found["seed"] else None
    return Case(name, found["kind"], float(found["rate"]), float(found["cv"] or 1), seed)


def _meaningless(found: re.Match[str]) -> bool:
    """A trace is as it is; of requests at once there is a whole number, and no gaps."""
    if found["kind"] == "azure":
        return bool(found["cv"] or found["seed"])
    return found["kind"] == "offline" and bool(found["cv"] or not found["rate"].isdigit())


def trace_requests(jsonl: str, variants: int, max_model_len: int) -> list[Request]:
    """A DeltaZip trace as it is: times, models and output lengths. Prompts count by their characters."""
    found = []
    for line in jsonl.splitlines():
        entry = json.loads(line)
        prompt = 1 + math.ceil(len(entry["prompt"]) / CHARACTERS_PER_TOKEN)  # 1: the begin-of-text token
        prompt, output = clip(prompt, entry["max_tokens"], max_model_len)
        found.append(Request(entry["timestamp"], _variant(entry["model"], variants), prompt, output))
    return sorted(found, key=lambda request: request.at_s)


def _variant(model: str, variants: int) -> int:
    """Fewer variants than the trace has (a dry run) take turns for its own."""
    if model == "base-model":
        return 0
    return (int(model.removeprefix("delta-")) - 1) % variants + 1


def clip(prompt: int, output: int, max_model_len: int) -> tuple[int, int]:
    """Lengths that fit: the output takes at most half, the prompt the rest. Neither is below 1."""
    output = max(1, min(output, max_model_len // 2))
    return max(1, min(prompt, max_model_len - output)), output


def azure_lengths(text: str, max_model_len: int) -> Lengths:
    """Times and lengths of every request in a file of Azure's LLM inference traces, clipped."""
    rows = csv.DictReader(io.StringIO(text))
    return [clip(int(r["ContextTokens"]), int(r["GeneratedTokens"]), max_model_len) for r in rows]


def popularity(variants: int, kind: str) -> npt.NDArray[np.float64]:
    """The share of each variant: alike, or the i-th's proportional to 1 / i^1.5."""
    ranks = np.arange(1, variants + 1, dtype=np.float64)
    weights = ranks**-ZIPF if kind == "zipf" else np.ones(variants)
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def arrivals(rate: float, seconds: float, cv: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Times below `seconds`, `rate` per second on average. Gaps are Gamma with that coefficient of variation;
    1 makes them exponential, the arrivals Poisson."""
    shape = 1 / cv**2
    times = np.empty(0)
    while not len(times) or times[-1] < seconds:
        gaps = rng.gamma(shape, 1 / (rate * shape), size=max(16, int(2 * rate * seconds)))
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
    return times[times < seconds]


def synthetic(case: Case, seconds: float, variants: int, lengths: Lengths, seed: int) -> list[Request]:
    """Poisson (or Gamma) arrivals of independent requests. Two cases of one rate and seed differ in who is
    asked, and in nothing else. The case's seed comes before `seed`; offline all arrive at 0."""
    seed = seed if case.seed is None else case.seed
    times_rng, lengths_rng, variants_rng = (np.random.default_rng([seed, i]) for i in range(3))
    times = arrivals(case.rate, seconds, case.cv, times_rng) if case.rated else np.zeros(int(case.rate))
    picked = lengths_rng.integers(len(lengths), size=len(times))
    asked = 1 + variants_rng.choice(variants, size=len(times), p=popularity(variants, case.kind))
    return [
        Request(float(at), int(variant), *lengths[int(which)])
        for at, variant, which in zip(times, asked, picked, strict=True)
    ]


def prompt_ids(request: Request, index: int, seed: int, vocabulary: int) -> list[int]:
    """Random tokens, different for each request: no prefix is shared, nothing can be cached."""
    rng = np.random.default_rng([seed, 3, index])
    return [int(token) for token in rng.integers(3, vocabulary, size=request.prompt_tokens)]
