"""KL between two checkpoints over the whole vocabulary: exact, where an engine's top tokens give a bound."""

from __future__ import annotations

from profiler.evaluation.evaluate import divergence_result, pair_of
from profiler.evaluation.results import Result
from profiler.evaluation.tasks import Task
from workers.evaluation.torch_answerer import TorchAnswerer


def exact_divergence(task: Task, answerer: TorchAnswerer, reference: TorchAnswerer, name: str) -> Result:
    """KL(reference || answerer) in nats a token, at the right answers' (or the texts') tokens.

    `name` is the reference's. Errors: ValueError when the two cut a text into other tokens.
    """
    pairs = [pair_of(item, task.settings.format) for item in task.items]
    mine, theirs = answerer.encoder.pairs(pairs), reference.encoder.pairs(pairs)
    if mine != theirs:
        raise ValueError(f"'{name}' has another tokenizer: a KL compares models that share one")
    sums, tokens = [0.0] * len(pairs), [0] * len(pairs)
    both = zip(answerer.predictions(mine), reference.predictions(theirs), strict=True)
    for (index, ids, q), (other, _, p) in both:
        if other != index:
            raise ValueError("the two models batch in another order: are they of one vocabulary?")
        p, q = p.to(q.device).double(), q.double()
        if p.shape != q.shape:
            raise ValueError(
                f"'{name}' has a vocabulary of {p.shape[1]} tokens and the other model one of {q.shape[1]}: "
                "a KL compares models that share one"
            )
        sums[index] = float((p.exp() * (p - q)).sum().clamp(min=0))
        tokens[index] = len(ids)
    return divergence_result(task, name, sums, tokens)
