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

from collections.abc import Iterable
from typing import Any

from workers.patches.vllm import failed_answers, missing_pieces, request_ids

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

    processor, rows = llm.output_processor, llm.model_config.get_vocab_size()

    def check(request: Any) -> None:
        try:
            check_ids(request, rows, processor.tokenizer)
        except IdWithoutRow as e:
            raise VLLMValidationError(str(e), parameter=e.parameter) from e

    request_ids.install(processor, check)
    failed_answers.install(processor)
    missing_pieces.install()


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
