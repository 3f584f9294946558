"""KL between two checkpoints over the whole vocabulary: exact; an engine's top tokens give only a bound."""

from __future__ import annotations

import torch

from profiler.evaluation.evaluate import divergence_result, pair_of
from profiler.evaluation.results import Result
from profiler.evaluation.tasks import Task
from workers.evaluation.torch_answerer import TorchAnswerer


def exact_divergence(task: Task, answerer: TorchAnswerer, reference: TorchAnswerer, name: str) -> Result:
    """KL(reference || answerer) in nats a token, at the tokens of the right answers (or of the texts).

    `name` is the reference's. Errors: ValueError if the two split a text into different tokens.
    """
    pairs = [pair_of(item, task.settings.format) for item in task.items]
    mine, theirs = answerer.encoder.pairs(pairs), reference.encoder.pairs(pairs)
    if mine != theirs:
        raise ValueError(f"'{name}' has another tokenizer: a KL compares models that share one")
    sums, tokens = [0.0] * len(pairs), [0] * len(pairs)
    limit = min(answerer.token_limit, reference.token_limit)  # so that both make the same batches
    both = zip(answerer.predictions(mine, limit), reference.predictions(theirs, limit), strict=True)
    for (index, ids, own), (_, _, other) in both:
        sums[index] = _nats(other.to(own.device).double(), own.double(), name)
        tokens[index] = len(ids)
    return divergence_result(task, name, sums, tokens)


def _nats(p: torch.Tensor, q: torch.Tensor, name: str) -> float:
    """The KL over all positions, from ln p and ln q [n, vocabulary]."""
    if p.shape != q.shape:
        raise ValueError(
            f"'{name}' has a vocabulary of {p.shape[1]} tokens and the other model one of {q.shape[1]}: "
            "a KL compares models that share one"
        )
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    return max(float(terms.sum()), 0.0)
