"""Bounds the cost of a grammar for the step that all requests share.

Before each step vLLM asks each request's grammar which tokens may follow, one after the other, in the
scheduling loop. With nested repetitions this takes seconds, in which every stream stops. So if a grammar
takes longer than MASK_LIMIT_S for one token, its request ends in an error with the next token. The grammar is
not compiled again.

vLLM chooses a backend for each request, but then compiles with the backend of the engine's first request. A
grammar meant for another backend is ignored, or fails. Here each request uses its own backend.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

log = logging.getLogger(__name__)

# CPU time of the thread, so that a busy machine ends no request. JSON schemas take 5 ms at most.
MASK_LIMIT_S = 0.1
KEPT = 1024  # grammars that are known to be slow

_slow: dict[int, None] = {}  # hashes of grammars, in the order in which they were found


class SlowGrammar(ValueError):
    """A grammar was too slow in an earlier request."""


def bound() -> None:
    """Bound vLLM's grammars in this process. A second call changes nothing."""
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend, OutlinesGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

    bound_grammars(XgrammarBackend, XgrammarGrammar)
    bound_grammars(GuidanceBackend, GuidanceGrammar)
    bound_grammars(OutlinesBackend, OutlinesGrammar)
    separate_backends(StructuredOutputManager)


def separate_backends(manager: Any) -> None:
    """Make a manager of vLLM's compile each grammar with the backend chosen for it."""
    if hasattr(manager, "ostinato_managers"):
        return
    init = manager.grammar_init

    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        self.ostinato_managers = self.ostinato_managers or {}
        if name not in self.ostinato_managers:
            self.ostinato_managers[name] = copy.copy(self)
            self.ostinato_managers[name].backend = None
        own = self.ostinato_managers[name]
        init(own, request)
        self.backend = self.backend or own.backend  # its masks are used for all

    manager.ostinato_managers, manager.grammar_init = None, grammar_init


def bound_grammars(backend: Any, grammar: Any) -> None:
    """Bound a backend of vLLM's and the grammars that it compiles (both are classes)."""
    if hasattr(grammar, "ostinato_slow"):
        return
    fill, accept, compile_ = grammar.fill_bitmask, grammar.accept_tokens, backend.compile_grammar

    def compile_grammar(self: Any, request_type: Any, grammar_spec: str, *args: Any, **kwargs: Any) -> Any:
        key = hash((request_type, grammar_spec))
        if key in _slow:
            raise SlowGrammar(
                "finding the next tokens of this grammar takes too long; send a simpler grammar"
            )
        made = compile_(self, request_type, grammar_spec, *args, **kwargs)
        if not hasattr(self, "ostinato_width"):
            self.ostinato_width = self.allocate_token_bitmask(1).shape[1]
        made.ostinato_key, made.ostinato_width = key, self.ostinato_width
        return made

    def fill_bitmask(self: Any, bitmask: Any, idx: int) -> None:
        if self.ostinato_slow:  # it ends with this step's token, whichever that is
            bitmask[idx].fill_(-1)
            return
        began_s, width = time.thread_time(), bitmask.shape[1]
        if self.ostinato_width == width:
            fill(self, bitmask, idx)
        else:  # backends count padding and added tokens in different ways
            own = bitmask.new_zeros((1, max(self.ostinato_width, width)))
            fill(self, own[:, : self.ostinato_width], 0)
            bitmask[idx] = own[0, :width]
        _judge(self, time.thread_time() - began_s)

    def accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
        if self.ostinato_slow:
            return False
        began_s = time.thread_time()
        accepted = bool(accept(self, request_id, tokens))
        _judge(self, time.thread_time() - began_s)
        return accepted

    grammar.ostinato_slow, grammar.ostinato_key = False, None
    grammar.fill_bitmask, grammar.accept_tokens = fill_bitmask, accept_tokens
    backend.compile_grammar = compile_grammar


def _judge(grammar: Any, took_s: float) -> None:
    if took_s <= MASK_LIMIT_S:
        return
    grammar.ostinato_slow = True
    log.warning("finding the next tokens of a grammar took %.2f s; the engine ends the request", took_s)
    if grammar.ostinato_key is not None:
        _slow[grammar.ostinato_key] = None
        while len(_slow) > KEPT:
            del _slow[next(iter(_slow))]
