"""A GGUF file as the engine wants it: plain metadata, tensors dequantised to float32 by the public reader."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


class GgufError(ValueError):
    """The file is not a GGUF file this engine can read; the message names the file and the reason."""


class _Reader(gguf.GGUFReader):
    """Takes its quarter of a million small slices of a plain array over the mapped file: of numpy's memmap,
    which the base class makes, each costs several times as much, and a start of an engine two seconds."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)


class GgufFile:
    """An open GGUF file: `metadata` by key, names of `tensors`. Closing it unmaps the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        # The reader checks little of what it reads: a damaged file shows as any of these.
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise GgufError(f"{path}: not a GGUF file, or damaged ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors = frozenset(self._tensors)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Its views are what keeps the file mapped.
        self._tensors.clear()

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises GgufError unless tensor `name` is there with this shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise GgufError(f"{self.path}: the tensor {name!r} is missing; is this a llama model?")
        found = tuple(int(size) for size in reversed(tensor.shape))  # the file counts from the innermost
        if found != shape:
            raise GgufError(f"{self.path}: tensor {name!r} has shape {found}, expected {shape}")

    def read(self, name: str, out: NDArray[np.float32]) -> None:
        """Dequantise tensor `name` into `out`, a C-contiguous float32 array of the tensor's shape."""
        self.expect(name, out.shape)
        tensor = self._tensors[name]
        try:
            out[...] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise GgufError(
                f"{self.path}: tensor {name!r} has the type {kind}, which can't be read"
            ) from error
