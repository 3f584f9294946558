"""Protects the engine from single requests: errors that would end it end only the request.

- A token id without a row in the embedding or the logits ends the engine. vLLM accepts ids up to the larger
  of the model's and the tokenizer's vocabulary; a `[PAD]` added to a tokenizer is such an id. Every request
  passes `OutputProcessor.add_request` on its way to the core, with its final parameters, so its ids are
  checked there.
- An answer that cannot be detokenised ends vLLM's output loop, and with it the engine. Here only that request
  gets the error.
- vLLM has no text for an id without a piece in a SentencePiece vocabulary (`prompt_logprobs` of padded rows).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

log = logging.getLogger(__name__)

# Parameters whose ids index the logits: the client's name of each, and vLLM's attribute with the ids.
IDS = {
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "logprob_token_ids": "logprob_token_ids",
}
BAD_WORDS = "_bad_words_token_ids"
STOPS = "_all_stop_token_ids"


class IdWithoutRow(ValueError):
    """A token id without a row in the model. `parameter` is the request's field with the id."""

    def __init__(self, parameter: str, token_id: int, text: str, rows: int) -> None:
        named = f" ({text!r:.60})" if text else ""
        super().__init__(
            f"{parameter}: token {token_id}{named} is outside the model's vocabulary of {rows} rows; use ids"
            f" from 0 to {rows - 1}, and text without such tokens"
        )
        self.parameter = parameter


def guard(llm: Any) -> None:
    """Check every request of this AsyncLLM, and let none of them end its output loop."""
    from vllm.exceptions import VLLMValidationError
    from vllm.tokenizers import detokenizer_utils

    processor, rows = llm.output_processor, llm.model_config.get_vocab_size()
    add_request = processor.add_request

    def checked(request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            check_ids(request, rows, processor.tokenizer)
        except IdWithoutRow as e:
            raise VLLMValidationError(str(e), parameter=e.parameter) from e
        add_request(request, *args, **kwargs)

    processor.add_request = checked
    processor.process_outputs = contained(processor)
    _spell_missing_pieces(detokenizer_utils)


def check_ids(request: Any, rows: int, tokenizer: Any) -> None:
    """Check the ids of an EngineCoreRequest. Raises IdWithoutRow.

    Stop ids out of range are dropped instead: they come from the model's files, and the model never generates
    them.
    """
    _check("prompt", request.prompt_token_ids or (), rows, tokenizer)
    params = request.sampling_params
    if params is None:
        return
    for parameter, attribute in IDS.items():
        _check(parameter, getattr(params, attribute, None) or (), rows, tokenizer)
    for word in getattr(params, BAD_WORDS, None) or ():
        _check("bad_words", word, rows, tokenizer)
    stops = getattr(params, STOPS, None) or ()
    if stops and max(stops) >= rows:
        setattr(params, STOPS, {token for token in stops if token < rows})


def _check(parameter: str, ids: Iterable[int], rows: int, tokenizer: Any) -> None:
    if not ids:
        return
    if (largest := max(ids)) >= rows:
        raise IdWithoutRow(parameter, largest, _text(tokenizer, largest), rows)
    if (smallest := min(ids)) < 0:
        raise IdWithoutRow(parameter, smallest, "", rows)


def _text(tokenizer: Any, token_id: int) -> str:
    try:
        return str(tokenizer.convert_ids_to_tokens(token_id) or "")
    except Exception:  # it is only for a message
        return ""


class _Walk:
    """Outputs in order; another loop continues where the last one stopped."""

    def __init__(self, outputs: Iterable[Any]) -> None:
        self.outputs = list(outputs)
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        while self.taken < len(self.outputs):
            self.taken += 1
            yield self.outputs[self.taken - 1]


def contained(processor: Any) -> Any:
    """A `process_outputs` in which a failing request gets its error, and the others continue."""
    process = processor.process_outputs

    def process_outputs(outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        walk, failures = _Walk(outputs), 0
        while True:
            try:
                done = process(walk, *args, **kwargs)
            except Exception as e:
                failures += 1
                _fail(processor, walk, e)
                continue
            if failures:
                done.reqs_to_abort.extend(_ended_here(processor, walk.outputs))
            return done

    return process_outputs


def _fail(processor: Any, walk: _Walk, error: Exception) -> None:
    """Give the error to the request of the last output taken; its waiting caller then aborts the request.

    Raises the error if it belongs to no request.
    """
    state = None
    if walk.taken:
        state = processor.request_states.get(walk.outputs[walk.taken - 1].request_id)
    if state is None or state.queue is None:
        raise error
    log.warning("a request's answer could not be decoded to text: %r", error, exc_info=error)
    # Not the error itself: vLLM treats a ValueError as a refusal, and would leave the request in its core.
    state.queue.put(RuntimeError(f"the answer could not be decoded to text: {error!r:.200}"))


def _ended_here(processor: Any, outputs: list[Any]) -> list[str]:
    """Requests that ended here, for example by a stop string, while the core continues them.

    vLLM's loop would have reported them, but an error interrupted it. Aborting a request that is gone does
    nothing.
    """
    return [
        output.request_id
        for output in outputs
        if output.request_id not in processor.request_states and not output.finished
    ]


def _spell_missing_pieces(utils: Any) -> None:
    restore = utils._restore_leading_spaces
    if getattr(restore, "spells_missing_pieces", False):
        return

    def restored(raw_token: str | None, token_str: str, marker: str) -> str:
        return str(restore(raw_token, token_str, marker)) if raw_token is not None else token_str

    restored.spells_missing_pieces = True  # type: ignore[attr-defined]
    utils._restore_leading_spaces = restored
