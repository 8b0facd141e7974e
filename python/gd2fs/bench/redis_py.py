"""redis-py reading, in a process of its own, as a program that uses it is.

Its speed depends on how the C library's allocator has been used before: in a process that has freed big
blocks the pages of replies are reused, elsewhere each reply's are made anew by the kernel. So every
measurement is a fresh process. ``python -m gd2fs.bench.redis_py PORT SIZE TOTAL BATCH`` prints the seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

#: A gigabyte at a tenth of the slowest speed seen.
RUN_S = 120.0
#: Makes the allocator keep what was freed: the best case, which a program may come into or ask for.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def key(size: int, number: int) -> bytes:
    """The name of a value of ``size`` bytes."""
    return b"%d:%d" % (size, number)


def seconds_of(port: int, size: int, total: int, batch: int, keep_memory: bool) -> float:
    """GETs of ``total`` bytes in values of ``size``, ``batch`` in a pipeline. Raises RuntimeError."""
    numbers = [str(number) for number in (port, size, total, batch)]
    done = subprocess.run(
        [sys.executable, "-m", "gd2fs.bench.redis_py", *numbers],
        env={**os.environ, **(KEEP_MEMORY if keep_memory else {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"redis-py failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def main(port: int, size: int, total: int, batch: int) -> None:
    import redis

    keys = [key(size, number) for number in range(total // size)]
    with redis.Redis(port=port) as client:
        client.ping()
        start = time.perf_counter()
        moved = 0
        if batch == 1:
            for one in keys:
                moved += len(client.get(one))
        else:
            for first in range(0, len(keys), batch):
                with client.pipeline(transaction=False) as pipeline:
                    for one in keys[first : first + batch]:
                        pipeline.get(one)
                    moved += sum(map(len, pipeline.execute()))
        seconds = time.perf_counter() - start
    if moved != total:
        raise RuntimeError(f"{moved} of {total} bytes came back")
    print(seconds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
