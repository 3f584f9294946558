"""The longest context that fits, where the requested context or the expected requests need too much memory.
Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from controlplane.planning.placement_question import Question
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.relaxing import nearest_first
from placement.types import Constraint, Placement, Relaxation

MIN_REQUEST_TOKENS = 2  # a prompt and an answer of one token
MIN_CONTEXT = 16  # the least that a deployment may request
_CONSTRAINTS = frozenset({Constraint.ENGINE_CONTEXT, Constraint.CONTEXT, Constraint.MAX_OUTPUT})


def with_offer(question: Question, outcome: Outcome) -> Outcome:
    """The outcome; a refusal offers the longest context that fits, if a shorter context suffices.

    Engines that are placed later have the sizes of the first, so nothing is offered for them.
    """
    if isinstance(outcome, Placement) or question.deployment.chosen is not None or question.fits():
        return outcome
    least = MIN_CONTEXT if question.deployment.engine.context_tokens else MIN_REQUEST_TOKENS
    tokens = longest(least, question.sizes.needed_context, lambda count: question.within(count).fits())
    return outcome if tokens is None else _offering(outcome, _relaxation(question, tokens))


def longest(least: int, refused: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number of tokens below `refused` that fits, at least `least`; None if there is none."""
    if least >= refused or not fits(least):
        return None
    fitting = least
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        fitting, refused = (middle, refused) if fits(middle) else (fitting, middle)
    return fitting


def _offering(outcome: NotPlaced, relaxation: Relaxation) -> NotPlaced:
    """The refusal with one more relaxation that suffices alone."""
    alone = () if outcome.together else outcome.relaxations
    options = nearest_first([*alone, relaxation])
    if outcome.binding is Constraint.MEMORY and not outcome.together:
        return dataclasses.replace(outcome, relaxations=options)
    binding = options[0].constraint
    return dataclasses.replace(
        outcome,
        binding=binding,
        reason=f"{binding} binds: {options[0].text}",
        relaxations=options,
        together=False,
    )


def _relaxation(question: Question, tokens: int) -> Relaxation:
    """The changes of a deployment that make it fit into a context of `tokens`. The first change names the
    constraint."""
    deployment, shorter = question.deployment, question.within(tokens).request
    request, changes = question.request, list[tuple[Constraint, int, int, str]]()
    if (context := deployment.engine.context_tokens or 0) > tokens:
        text = f"ask for a context of {tokens:,} tokens instead of {context:,}"
        changes.append((Constraint.ENGINE_CONTEXT, context, tokens, text))
    if (total := request.input_tokens + request.output_tokens) > tokens:
        text = (
            f"expect prompts of {shorter.input_tokens:,} tokens and answers of {shorter.output_tokens:,} "
            f"instead of {request.input_tokens:,} and {request.output_tokens:,}"
        )
        changes.append((Constraint.CONTEXT, total, tokens, text))
    if (answer := deployment.max_output_tokens or 0) >= tokens:
        text = f"end answers at {tokens - 1:,} tokens instead of {answer:,} (maxOutputLength)"
        changes.append((Constraint.MAX_OUTPUT, answer, tokens - 1, text))
    constraint, asked, offered, _ = changes[0]
    return Relaxation(constraint, asked, offered, asked / offered, " and ".join(text for *_, text in changes))


def is_nearest(refusal: NotPlaced) -> bool:
    """Whether the nearest relaxation is a shorter context."""
    nearest = refusal.relaxations[:1]
    return bool(nearest) and not refusal.together and nearest[0].constraint in _CONSTRAINTS


def eased(question: Question, relaxation: Relaxation, max_factor: float | None) -> Placement | None:
    """The placement with this shorter context, if its factor is at most `max_factor`."""
    if max_factor is not None and relaxation.factor > max_factor:
        return None
    tokens = int(relaxation.offered) + (relaxation.constraint is Constraint.MAX_OUTPUT)
    placement = question.within(tokens).placement()
    if placement is None:
        return None
    choice = dataclasses.replace(placement.choice, relaxed=(relaxation,))
    return dataclasses.replace(placement, choice=choice)
