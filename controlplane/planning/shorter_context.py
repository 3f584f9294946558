"""The longest context that fits, where the requested context or the expected requests need too much memory.
Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from controlplane.planning.placement_question import Question
from controlplane.state.records import Deployment
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
    if isinstance(outcome, Placement) or question.deployment.chosen is not None:
        return outcome
    refused = requested_tokens(question)
    if not refused or question.fits():
        return outcome
    least = MIN_CONTEXT if question.deployment.engine.context_tokens else MIN_REQUEST_TOKENS
    tokens = longest(least, refused, lambda count: question.of(shortened(question, count)).fits())
    return outcome if tokens is None else _offering(outcome, _relaxation(question, tokens))


def requested_tokens(question: Question) -> int:
    """The tokens of the longest request that the user wants answered; 0: the user named none."""
    deployment = question.deployment
    lengths = _lengths(question) if _lengths_given(deployment) else (0, 0)
    answer = deployment.max_output_tokens
    return max(deployment.engine.context_tokens or 0, sum(lengths), 0 if answer is None else answer + 1)


def shortened(question: Question, tokens: int) -> Deployment:
    """The deployment with a context, expected requests and a longest answer of at most `tokens` (2 or
    more)."""
    deployment, (inputs, outputs) = question.deployment, _lengths(question)
    context, answer = deployment.engine.context_tokens, deployment.max_output_tokens
    load = deployment.load
    if _lengths_given(deployment) and inputs + outputs > tokens:
        fewer = max(1, inputs * tokens // (inputs + outputs))
        load = dataclasses.replace(load, input_tokens=fewer, output_tokens=tokens - fewer)
    return dataclasses.replace(
        deployment,
        engine=dataclasses.replace(deployment.engine, context_tokens=context and min(context, tokens)),
        load=load,
        max_output_tokens=answer and min(answer, tokens - 1),
    )


def _lengths(question: Question) -> tuple[int, int]:
    return question.request.input_tokens, question.request.output_tokens


def _lengths_given(deployment: Deployment) -> bool:
    return bool(deployment.load.input_tokens or deployment.load.output_tokens)


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
    before, after = question.deployment, shortened(question, tokens)
    changes = list[tuple[Constraint, int, int, str]]()
    if (context := before.engine.context_tokens) and context > tokens:
        text = f"ask for a context of {tokens:,} tokens instead of {context:,}"
        changes.append((Constraint.ENGINE_CONTEXT, context, tokens, text))
    if before.load != after.load:
        inputs, outputs = _lengths(question)
        text = (
            f"expect prompts of {after.load.input_tokens:,} tokens and answers of "
            f"{after.load.output_tokens:,} instead of {inputs:,} and {outputs:,}"
        )
        changes.append((Constraint.CONTEXT, inputs + outputs, tokens, text))
    if (answer := before.max_output_tokens) and answer >= tokens:
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
    placement = question.of(shortened(question, tokens)).placement()
    if placement is None:
        return None
    choice = dataclasses.replace(placement.choice, relaxed=(relaxation,))
    return dataclasses.replace(placement, choice=choice)
