"""Bounds the cost of a grammar for the step that all requests share.

Before each step vLLM asks each request's grammar which tokens may follow, one after the other, in the
scheduling loop. With nested repetitions this takes seconds, in which every stream stops. So if a grammar
takes longer than MASK_LIMIT_S for one token, its request ends in an error with the next token. The grammar is
not compiled again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

log = logging.getLogger(__name__)

# CPU time of the thread, so that a busy machine ends no request. JSON schemas take 5 ms at most.
MASK_LIMIT_S = 0.1
KEPT = 1024  # grammars that are known to be slow

_BACKENDS = {"xgrammar": "Xgrammar", "guidance": "Guidance", "outlines": "Outlines"}


def _targets(part: str, parameters: tuple[str, ...], *read: tuple[str, str]) -> tuple[Target, ...]:
    """The part of each backend; `read` are its digests in 0.26 and 0.32."""
    return tuple(
        Target(
            f"vllm.v1.structured_output.backend_{module}",
            f"{name}{part}",
            parameters,
            read={"0.26": old, "0.32": new},
        )
        for (module, name), (old, new) in zip(_BACKENDS.items(), read, strict=True)
    )


COMPILE = _targets(
    "Backend.compile_grammar",
    ("request_type", "grammar_spec"),
    ("335b8670ea23", "b1ebb9c0c209"),
    ("b97511d9e931", "bb18ae1bd7b1"),
    ("f1adb07253fe", "c4930f1d69bf"),
)
FILL = _targets(
    "Grammar.fill_bitmask",
    ("bitmask", "idx"),
    ("a235f340d787", "a235f340d787"),
    ("937b9a3118e6", "937b9a3118e6"),
    ("f226ec2c93c6", "f226ec2c93c6"),
)
ACCEPT = _targets(
    "Grammar.accept_tokens",
    ("request_id", "tokens"),
    ("64cae580a6c4", "bcc62b086404"),
    ("33e0a68db322", "22a338056c8c"),
    ("577f552f94a3", "1cfdefa75412"),
)

_slow: dict[int, None] = {}  # hashes of grammars, in the order in which they were found


class SlowGrammar(ValueError):
    """A grammar was too slow in an earlier request."""


def install() -> None:
    """Bound the grammars of an engine's core."""
    for targets, make in ((COMPILE, _compiling), (FILL, _filling), (ACCEPT, _accepting)):
        for target in targets:
            target.replace_once(make)


def _compiling(compile_: Callable[..., Any]) -> Callable[..., Any]:
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
        made.ostinato_slow = False
        return made

    return compile_grammar


def _filling(fill: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
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

    return fill_bitmask


def _accepting(accept: Callable[[Any, str, list[int]], Any]) -> Callable[[Any, str, list[int]], bool]:
    def accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
        if self.ostinato_slow:
            return False
        began_s = time.thread_time()
        accepted = bool(accept(self, request_id, tokens))
        _judge(self, time.thread_time() - began_s)
        return accepted

    return accept_tokens


def _judge(grammar: Any, took_s: float) -> None:
    if took_s <= MASK_LIMIT_S:
        return
    grammar.ostinato_slow = True
    log.warning("finding the next tokens of a grammar took %.2f s; the engine ends the request", took_s)
    _slow[grammar.ostinato_key] = None
    while len(_slow) > KEPT:
        del _slow[next(iter(_slow))]
