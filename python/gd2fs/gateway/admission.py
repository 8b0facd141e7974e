"""How many requests are worked on at once, and how many may wait. More are refused at once, so that
overload ends.
"""

from __future__ import annotations

import asyncio


class Overloaded(Exception):
    """No place now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """`active_max` places; `waiting_max` requests may wait at most `waiting_s` for one."""

    def __init__(self, active_max: int, waiting_max: int, waiting_s: float) -> None:
        self._places = asyncio.Semaphore(active_max)
        self._waiting_max = waiting_max
        self._waiting_s = waiting_s
        self.waiting = 0
        self.active = 0

    async def enter(self) -> None:
        """Takes a place; give it back with leave(). Raises Overloaded."""
        if self._places.locked():
            if self.waiting >= self._waiting_max:
                raise Overloaded(f"{self.waiting} requests are waiting already", 1)
            self.waiting += 1
            try:
                await asyncio.wait_for(self._places.acquire(), self._waiting_s)
            except TimeoutError:
                raise Overloaded(f"no place became free within {self._waiting_s:g} s", 5) from None
            finally:
                self.waiting -= 1
        else:
            await self._places.acquire()
        self.active += 1

    def leave(self) -> None:
        self.active -= 1
        self._places.release()
