"""Codecs of numpy scalars and arrays: the dtype as numpy spells it, the shape, and the bytes of the
items.

numpy is imported only where there are some, so that readers of other checkpoints start faster.
"""

from __future__ import annotations

import re
import sys
from math import prod
from typing import Any

from .strict import exact, exact_items, short

__all__ = [
    "array_of",
    "bytes_of",
    "is_array",
    "is_numpy",
    "payload_of",
    "scalar_of",
    "why_not_storable",
]

# As numpy writes them: byte order, kind, size, and the unit of times. What else it reads, it takes
# for a small language.
_SPELLING = re.compile(r"[<>|=][a-zA-Z][0-9]{0,10}(\[[0-9]*[a-zA-Zμ]+(/[0-9]+)?\])?")


def is_array(value: Any) -> bool:
    np = sys.modules.get("numpy")
    return np is not None and type(value) is np.ndarray


def is_numpy(value: Any) -> bool:
    """Whether `value` is an array or a scalar of numpy's own. Where numpy was not imported, nothing
    can be."""
    np = sys.modules.get("numpy")
    return is_array(value) or (
        np is not None and isinstance(value, np.generic) and type(value).__module__ == "numpy"
    )


def bytes_of(value: Any) -> bytes:
    """The bytes of a flat array of bytes. Raises TypeError for anything else."""
    if not is_array(value) or value.dtype.str != "|u1" or value.ndim != 1:
        raise TypeError(f"{type(value).__name__} is no flat array of bytes")
    return bytes(value.tobytes())


def why_not_storable(value: Any) -> str | None:
    if value.dtype.hasobject or value.dtype.names is not None:
        return f"numpy dtype {value.dtype} cannot be stored (objects or named fields)"
    return None


def payload_of(value: Any) -> list[Any]:
    """[dtype, shape, bytes] of an array, [dtype, bytes] of a scalar."""
    raw = value.tobytes() if value.dtype.itemsize else b""
    dtype = str(value.dtype.str)
    return [dtype, list(value.shape), raw] if is_array(value) else [dtype, raw]


def scalar_of(dtype: str, raw: bytes) -> Any:
    import numpy as np

    kind = _dtype(dtype)
    if kind.kind == "S":  # arrays cut zeros off the end of their strings
        return np.bytes_(exact(raw, bytes))
    if kind.kind == "U":
        return np.str_(
            exact(raw, bytes).decode(
                "utf-32-be" if dtype.startswith(">") else "utf-32-le", "surrogatepass"
            )
        )
    return array_of(dtype, [], raw)[()]


def array_of(dtype: str, shape: list[int], raw: bytes) -> Any:
    import numpy as np

    kind = _dtype(dtype)
    if kind.hasobject or kind.names is not None or any(n < 0 for n in exact_items(shape, int)):
        raise ValueError(
            f"numpy dtype {dtype!r} or shape {short(shape)} is not one that is ever stored"
        )
    count = prod(shape)
    if count * kind.itemsize != len(exact(raw, bytes)):
        raise ValueError(f"{len(raw)} bytes do not hold {short(count)} items of {dtype}")
    if kind.itemsize == 0 and count:
        raise ValueError(f"{short(count)} items of nothing")
    if count == 0:
        return np.zeros(shape, kind)
    return np.frombuffer(bytearray(raw), kind).reshape(shape)


def _dtype(text: Any) -> Any:
    import numpy as np

    if not _SPELLING.fullmatch(exact(text, str)) or (kind := np.dtype(text)).str != text:
        raise ValueError(f"numpy dtype {short(text)} is not one that is ever stored")
    return kind
