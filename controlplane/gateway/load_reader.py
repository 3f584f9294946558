"""Listen to one worker's load over a connection that is kept open, and made again when it breaks.

A worker without such a path (an older one), or without an answer, costs a try now and then. Otherwise it is
treated like the others: decisions use the age of a load.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from workers import load_lines, request_headers
from workers.http1.client import BrokenOff, Connection, NotConnected, Pool
from workers.load_lines import STALE_S
from workers.messages import WorkerLoad

log = logging.getLogger(__name__)

# Pauses between tries double, from the first to the longest. Many gateways may have lost the same worker, so
# each one shortens its pauses at random.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
LONGEST_OF_ONE_HEARD_S = 2.0  # meanwhile the worker counts as silent
LONGEST_LINE_BYTES = 1 << 20


class LoadReader:
    """Calls `on_load` with each load that the worker at this address pushes, until it is closed."""

    def __init__(
        self, address: str, secret: str, on_load: Callable[[WorkerLoad], None], proof: str = ""
    ) -> None:
        """`proof`: the token in the worker's answers; empty for older workers, whose answers have none."""
        self._address = address
        self._secret = secret
        self._proof = proof
        self._on_load = on_load
        self._pause_s = FIRST_PAUSE_S
        self._longest_s = LONGEST_PAUSE_S
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def close(self) -> None:
        """End the connection. `on_load` is no longer called."""
        self._task.cancel()

    async def _keep(self) -> None:
        while True:
            try:
                await self._listen()
            except (NotConnected, BrokenOff, TimeoutError, ValueError) as e:
                log.info("the worker at %s does not report its load: %r", self._address, e)
            except Exception:  # raised by `on_load`: the next load may work
                log.exception(
                    "the gateway could not use a load that the worker at %s reported", self._address
                )
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, self._longest_s)

    async def _listen(self) -> None:
        """Listen until the worker ends it. Raises NotConnected, BrokenOff, ValueError, or TimeoutError when
        the worker is silent."""
        connection = await Pool(self._address).take()
        try:
            async with asyncio.timeout(STALE_S):
                await connection.ask(load_lines.PATH, self._headers(), method="GET")
            if not request_headers.proves(connection.headers, self._proof):
                raise ValueError("another process answers at this address")
            if connection.status != 200:
                raise ValueError(f"the worker answered with status {connection.status}")
            async with aclosing(_lines(connection)) as lines:
                async for line in lines:
                    load = load_lines.load_of(line)
                    self._pause_s, self._longest_s = FIRST_PAUSE_S, LONGEST_OF_ONE_HEARD_S
                    self._on_load(load)
        finally:
            connection.abort()

    def _headers(self) -> dict[str, str]:
        return {"host": self._address, request_headers.SECRET: self._secret}


async def _lines(connection: Connection) -> AsyncGenerator[bytes, None]:
    """Whole lines, however they were split on their way. Raises BrokenOff, ValueError, and TimeoutError after
    a silence."""
    begun = b""
    while True:
        async with asyncio.timeout(STALE_S):
            piece = await connection.piece()
        if piece is None:
            return
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            yield line
        if len(begun) > LONGEST_LINE_BYTES:
            raise ValueError(f"expected lines of at most {LONGEST_LINE_BYTES} bytes, got a longer one")
