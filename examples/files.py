"""Files from Python: a list of numpy arrays goes into GD2FS and comes back, without a copy in Python on the
way.

Start a cluster first (`gd2fs up`), then run `python examples/files.py`.
"""

from __future__ import annotations

import asyncio

import numpy as np

import gd2fs

PATH = "/examples/arrays.bin"


async def read_concurrently(client: gd2fs.Client, into: list[np.ndarray]) -> None:
    """All reads are under way at once; each lands in its own array."""
    offsets = np.cumsum([0, *(array.nbytes for array in into)])
    await asyncio.gather(
        *(client.aread_into(PATH, int(offset), array) for offset, array in zip(offsets, into, strict=False))
    )


def main() -> None:
    arrays = [np.random.default_rng(seed).random(1_000_000, np.float32) for seed in range(4)]
    with gd2fs.connect() as client:
        client.mkdir("/examples")
        client.create(PATH)
        written = client.write(PATH, 0, arrays)
        back = [np.empty_like(array) for array in arrays]
        asyncio.run(read_concurrently(client, back))
        same = all(np.array_equal(a, b) for a, b in zip(arrays, back, strict=True))
        print(f"{written} bytes written to {PATH}; read back {'equal' if same else 'DIFFERENT'}")
        client.delete(PATH)


if __name__ == "__main__":
    main()
