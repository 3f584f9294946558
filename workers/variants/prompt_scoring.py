"""Log-probabilities of prompts by each variant's own head.

A head runs on the sampled rows, and `Batch.samples` has their slots. vLLM scores prompts with the same head,
on a stretch of all tokens' hidden states: other rows, in another order. This module wraps vLLM's runners to
detect the scoring, and the model's `compute_logits` to detect the stretch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workers.variants.batch import Batch

# The methods of both model runners that score prompts. Each has a parameter `hidden_states`, of all tokens of
# the step.
SCORERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("_get_prompt_logprobs_dict",)),
    (
        "vllm.v1.worker.gpu.sample.prompt_logprob",
        "PromptLogprobsWorker",
        ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"),
    ),
)
HIDDEN = "hidden_states"
_OURS = "_ostinato_scores"


class _Scored:
    """`hidden`: all tokens' hidden states [tokens, width] while prompts are scored, else None.

    A process runs one step at a time.
    """

    hidden: torch.Tensor | None = None


def follow(model: Any, batch: Batch) -> None:
    """Make the model's head find the right rows of `batch`, also when prompts are scored."""
    for module, owner, methods in SCORERS:
        if module in sys.modules:  # the runner in use has been imported: it called us
            for method in methods:
                _say_when(getattr(sys.modules[module], owner), method)
    compute = model.compute_logits

    @functools.wraps(compute)
    def computed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _Scored.hidden is None:
            return compute(hidden_states, *args, **kwargs)
        first = first_row(_Scored.hidden, hidden_states)
        with batch.scoring(first, len(hidden_states)):
            return compute(hidden_states, *args, **kwargs)

    model.compute_logits = computed


def _say_when(owner: type, method: str) -> None:
    """Wrap the method, once per process."""
    inner: Callable[..., Any] | None = getattr(owner, method, None)
    if inner is None or hasattr(inner, _OURS):  # not every vLLM version has each of them
        return
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def scores(*args: Any, **kwargs: Any) -> Any:
        with _scoring(signature.bind(*args, **kwargs).arguments[HIDDEN]):
            return inner(*args, **kwargs)

    setattr(scores, _OURS, True)
    setattr(owner, method, scores)


@contextmanager
def _scoring(hidden: torch.Tensor) -> Iterator[None]:
    _Scored.hidden = hidden
    try:
        yield
    finally:
        _Scored.hidden = None


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
