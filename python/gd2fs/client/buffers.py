"""What may stand for memory in a call: anything with the buffer protocol, arrays and CPU tensors, alone or
in lists."""

from __future__ import annotations

import array
import mmap
from typing import Any

import numpy as np

from gd2fs import errors

# Types that the native module takes as they are; a list of only these costs no Python work per entry.
_DIRECT = frozenset({bytes, bytearray, memoryview, np.ndarray, mmap.mmap, array.array})


def as_list(buffers: Any) -> list[Any]:
    """One object or a list or tuple of them, as a list of objects with the buffer protocol. Nothing is
    copied.

    Raises BadRequest, naming the argument, for an object whose memory the CPU can't reach in one piece.
    """
    objects = list(buffers) if isinstance(buffers, (list, tuple)) else [buffers]
    if set(map(type, objects)) <= _DIRECT:
        return objects
    return [_adapted(item, index) for index, item in enumerate(objects)]


def _adapted(item: Any, index: int) -> Any:
    if type(item) in _DIRECT:
        return item
    name = f"buffers[{index}] ({type(item).__name__})"
    if hasattr(item, "data_ptr") and hasattr(item, "element_size"):
        return _tensor(item, name)
    if hasattr(item, "__array_interface__"):
        return np.asarray(item)
    try:
        return memoryview(item)
    except TypeError:
        pass
    if hasattr(item, "__dlpack__"):
        try:
            return np.from_dlpack(item)
        except (BufferError, RuntimeError, TypeError) as error:
            raise errors.BadRequest(f"{name} can't be used through DLPack: {error}") from error
    raise errors.BadRequest(
        f"{name} does not offer the buffer protocol; pass bytes, an array, a memoryview or a CPU tensor"
    )


class _Bytes:
    """The bytes of a tensor as numpy sees them: a tensor's own element type (bfloat16, float8) may be
    foreign to numpy."""

    def __init__(self, owner: Any, address: int, length: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (length,),
            "data": (address, False),
        }


def _tensor(tensor: Any, name: str) -> np.ndarray[Any, Any]:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise errors.BadRequest(f"{name} is on {device}; this build moves CPU memory only: pass tensor.cpu()")
    if not tensor.is_contiguous():
        raise errors.BadRequest(f"{name} is not contiguous; pass tensor.contiguous()")
    length = tensor.numel() * tensor.element_size()
    # The array keeps the object, and with it the tensor, alive.
    return np.asarray(_Bytes(tensor, tensor.data_ptr(), length)) if length else np.empty(0, np.uint8)
