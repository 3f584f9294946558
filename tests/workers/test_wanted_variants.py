"""Variants that are read ahead of their requests: one at a time, and failures are not reported."""

from __future__ import annotations

import asyncio

from workers.messages import VariantRef
from workers.server.wanted_variants import MOST, WantedVariants


def variant(uid: int) -> VariantRef:
    return VariantRef(f"v{uid}", uid, f"/v{uid}")


class Reading:
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.at_once = self.most_at_once = 0
        self.may_end = asyncio.Semaphore(0)
        self.failing: set[int] = set()

    async def __call__(self, variant: VariantRef) -> None:
        self.begun.append(variant.uid)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.may_end.acquire()
            if variant.uid in self.failing:
                raise ValueError("its file is torn")
        finally:
            self.at_once -= 1


async def until(reading: Reading, count: int) -> None:
    async with asyncio.timeout(30):
        while len(reading.begun) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def turns() -> None:
    """For whatever would still begin."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_each_is_read_once_and_one_after_the_other() -> None:
    reading = Reading()
    wanted = WantedVariants(reading)
    for uid in (1, 2, 1, 3, 2, 1):
        wanted.add(variant(uid))
    for count in (1, 2, 3):
        await until(reading, count)
        wanted.add(variant(count))  # it is being read
        reading.may_end.release()
    await turns()
    assert reading.begun == [1, 2, 3]
    assert reading.most_at_once == 1
    wanted.close()


async def test_a_failed_variant_delays_no_other_and_is_retried_when_wanted() -> None:
    reading = Reading()
    reading.failing = {1}
    wanted = WantedVariants(reading)
    wanted.add(variant(1))
    wanted.add(variant(2))
    await until(reading, 1)
    reading.may_end.release()
    await until(reading, 2)
    wanted.add(variant(1))
    reading.may_end.release()
    await until(reading, 3)
    assert reading.begun == [1, 2, 1]
    wanted.close()


async def test_the_number_of_waiting_variants_is_bounded() -> None:
    reading = Reading()
    wanted = WantedVariants(reading)
    for uid in range(1, 3 * MOST):
        wanted.add(variant(uid))
    for count in range(1, MOST + 1):
        await until(reading, count)
        reading.may_end.release()
    await turns()
    assert reading.begun == list(range(1, MOST + 1))


async def test_a_variant_that_is_to_be_forgotten_is_not_read_later() -> None:
    reading = Reading()
    wanted = WantedVariants(reading)
    for uid in (1, 2, 3):
        wanted.add(variant(uid))
    await until(reading, 1)
    wanted.discard(1)
    wanted.discard(2)
    for count in (1, 2):
        await until(reading, count)
        reading.may_end.release()
    await turns()
    assert reading.begun == [1, 3]
