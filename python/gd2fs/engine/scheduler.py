"""Who has the model: one generation at a time, the others wait in line, and the line has an end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gd2fs.engine.generate import Generation, Result

# Generations that are over and wait for their last acknowledgements while the next one computes. Each holds
# the KV of a sequence, so they are few.
FINISHING_MAX = 2
RETRY_AFTER_MAX_S = 60


class Busy(Exception):
    """The line is full; `retry_after_s` is when a place is likely to be free."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests are waiting for the model already")
        self.retry_after_s = retry_after_s


class Scheduler:
    """Runs generations in threads, so that the event loop stays free. BLAS uses all cores for one generation;
    two at a time would only share them.
    """

    def __init__(self, queue_max: int) -> None:
        self._queue_max = queue_max
        self._places = asyncio.Semaphore(1 + FINISHING_MAX)
        self._model = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1 + FINISHING_MAX, thread_name_prefix="generate")
        self._mean_s = 1.0
        self.active = 0  # computing or finishing
        self.waiting = 0

    def admit(self) -> None:
        """Take a place in line, for `run`. Raises Busy when there is none."""
        if self.waiting >= self._queue_max and (self._model.locked() or self._places.locked()):
            raise Busy(self.waiting, min(RETRY_AFTER_MAX_S, 1 + round(self.waiting * self._mean_s)))
        self.waiting += 1

    async def run(self, generation: Generation) -> Result:
        """Wait, compute, finish. Call `admit` first. Raises what `compute` raised, after finishing."""
        loop = asyncio.get_running_loop()
        try:
            await self._places.acquire()
        except BaseException:
            self.waiting -= 1
            raise
        try:
            failure = await self._compute(loop, generation)
            result = await loop.run_in_executor(self._threads, generation.finish)
        finally:
            self.active -= 1
            self._places.release()
        if failure is not None:
            raise failure
        return result

    async def _compute(self, loop: asyncio.AbstractEventLoop, generation: Generation) -> Exception | None:
        try:
            await self._model.acquire()
        finally:
            self.waiting -= 1
            self.active += 1
        try:
            if generation.cancelled.is_set():
                generation.result.finish_reason = "cancelled"
                return None
            started = loop.time()
            await loop.run_in_executor(self._threads, generation.compute)
            self._mean_s += 0.2 * (loop.time() - started - self._mean_s)
        except Exception as error:
            return error
        finally:
            self._model.release()
        return None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
