"""Tensor files: the safetensors header and byte layout.

A file is 8 bytes (header length, little-endian), the JSON header, and the tensors' bytes back to
back in C order. Tensors are ordered by (item size descending, name): stock readers demand data
without holes and aligned to the item size, and this order gives both for any shapes. The header is
padded with spaces to a multiple of 4096 bytes, so that the data of large files can be mapped and
written in whole pages. Source: the safetensors format description.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

HEADER_LIMIT = 100_000_000  # stock readers refuse more
ALIGNMENT = 4096
METADATA = {"format": "pt"}  # Hugging Face refuses weight files without it


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype: its name in indexes, bytes per item, and whether safetensors files know it by that
    name.

    Other dtypes are stored as `U8` with the item size as an extra last dimension.
    """

    name: str
    itemsize: int
    native: bool


def _table() -> dict[str, DType]:
    native = {
        1: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ",
        2: "U16 I16 F16 BF16",
        4: "U32 I32 F32",
        8: "U64 I64 F64 C64",
    }
    # Named as torch names them. No stock reader knows these, or not under one agreed name.
    other = {
        1: "float8_e8m0fnu float4_e2m1fn_x2 bits8",
        2: "bits16",
        4: "complex32",
        16: "complex128",
    }
    small = " ".join(f"int{n} uint{n}" for n in range(1, 8))
    other[1] = f"{other[1]} {small} bits1x8 bits2x4 bits4x2"
    table = {n: DType(n, size, True) for size, names in native.items() for n in names.split()}
    table |= {n: DType(n, size, False) for size, names in other.items() for n in names.split()}
    return table


DTYPES: dict[str, DType] = _table()


def tensor_nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor in C order."""
    return DTYPES[dtype].itemsize * prod(shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: `start` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
) -> tuple[bytes, list[StoredTensor]]:
    """Header bytes, and the tensors in file order, for (name, dtype, shape) triples in any order.

    Raises ValueError when two names are equal or the header would be larger than stock readers
    accept.
    """
    ordered = sorted(
        tensors, key=lambda t: (-DTYPES[t[1]].itemsize if DTYPES[t[1]].native else -1, t[0])
    )
    header: dict[str, Any] = {"__metadata__": METADATA}
    placed: list[tuple[str, str, tuple[int, ...], int, int]] = []
    at = 0
    for name, dtype, shape in ordered:
        if name in header:
            raise ValueError(f"two tensors of one file are named {name!r}")
        kind = DTYPES[dtype]
        nbytes = tensor_nbytes(dtype, shape)
        stored_shape = [*shape] if kind.native else [*shape, kind.itemsize]
        stored_dtype = dtype if kind.native else "U8"
        header[name] = {
            "dtype": stored_dtype,
            "shape": stored_shape,
            "data_offsets": [at, at + nbytes],
        }
        placed.append((name, dtype, shape, at, nbytes))
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"a header of {len(text):,} bytes is larger than the {HEADER_LIMIT:,} that readers "
            "accept"
        )
    head = len(text).to_bytes(8, "little") + text
    return head, [StoredTensor(n, d, s, len(head) + a, b) for n, d, s, a, b in placed]
