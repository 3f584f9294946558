"""Log-probabilities of prompts by each variant's own head.

A head runs on the sampled rows. vLLM scores prompts with the same head, on a stretch of all tokens' hidden
states: other rows, in another order. This module wraps vLLM's runners to detect the scoring, and the model's
`compute_logits` to detect the stretch.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from profiler.patches.target import Target

log = logging.getLogger(__name__)

HIDDEN = "hidden_states"
_WORKER = "vllm.v1.worker.gpu.sample.prompt_logprob"
# The methods of both model runners that score prompts. `hidden_states` are those of all tokens of the step.
# vLLM 0.26 lacks the last one.
SCORERS = (
    Target(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._get_prompt_logprobs_dict",
        (HIDDEN,),
        read={"0.26": "294072065317", "0.32": "cb90d4f1064a"},
    ),
    Target(
        _WORKER,
        "PromptLogprobsWorker.compute_prompt_logprobs",
        (HIDDEN,),
        read={"0.26": "29cbce2b6c0b", "0.32": "c10e8eac4470"},
    ),
    Target(
        _WORKER,
        "PromptLogprobsWorker.compute_prompt_token_id_logprobs",
        (HIDDEN,),
        read={"0.32": "4867c58d2e41"},
    ),
)


class Rows(Protocol):
    """The rows of a step: within `scoring(first, count)`, the head runs on `count` rows from `first` on."""

    def scoring(self, first: int, count: int) -> AbstractContextManager[None]: ...


class _Scored:
    """`hidden`: all tokens' hidden states [tokens, width] while prompts are scored, else None.

    A process runs one step at a time.
    """

    hidden: torch.Tensor | None = None


def follow(model: Any, rows: Rows) -> None:
    """Make the model's head find the right rows, also when prompts are scored. Raises Moved."""
    # The runner in use has been imported: it called us.
    used = [scorer for scorer in SCORERS if scorer.module in sys.modules]
    if not used:
        log.error("no model runner of vLLM is loaded, so prompts are not scored by the heads of variants")
    for scorer in used:
        owner, _, method = scorer.name.partition(".")
        found = getattr(sys.modules[scorer.module], owner)
        if scorer is not SCORERS[-1] or hasattr(found, method):
            scorer.replace_once(_scoring, found)
    model.compute_logits = _computing(model.compute_logits, rows)


def _computing(compute: Callable[..., Any], rows: Rows) -> Callable[..., Any]:
    @functools.wraps(compute)
    def computed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _Scored.hidden is None:
            return compute(hidden_states, *args, **kwargs)
        first = first_row(_Scored.hidden, hidden_states)
        with rows.scoring(first, len(hidden_states)):
            return compute(hidden_states, *args, **kwargs)

    return computed


def _scoring(inner: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def scores(*args: Any, **kwargs: Any) -> Any:
        _Scored.hidden = signature.bind(*args, **kwargs).arguments[HIDDEN]
        try:
            return inner(*args, **kwargs)
        finally:
            _Scored.hidden = None

    return scores


def first_row(whole: torch.Tensor, part: torch.Tensor) -> int:
    """The row of `whole` [tokens, width] at which its stretch `part` [rows, width] begins.

    Errors: RuntimeError if `part` is no stretch of `whole`, since the slots of its rows are then unknown.
    """
    row_bytes = whole.stride(0) * whole.element_size()
    offset = part.data_ptr() - whole.data_ptr()
    first = offset // row_bytes if row_bytes else 0
    alike = (
        part.dtype == whole.dtype and part.stride() == whole.stride() and part.shape[1:] == whole.shape[1:]
    )
    if len(part) and not (alike and offset == first * row_bytes and 0 <= first <= len(whole) - len(part)):
        raise RuntimeError(
            f"expected hidden states for prompt scores to be rows of this step's {list(whole.shape)}, got "
            f"{list(part.shape)}; this version of vLLM scores prompts in an unknown way"
        )
    return first if len(part) else 0
