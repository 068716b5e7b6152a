"""Tensors that are put together from parts, or only pass through: in files that are mapped, so that
the system and not the process holds what does not fit."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..loading.view import CheckpointView, TensorInfo

__all__ = ["SMALL", "TORCH_DTYPES", "Scratch", "from_numpy", "torch_dtype"]

SMALL = 1 << 16  # bytes; smaller tensors are kept in memory

_SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
# By the names of safetensors files.
TORCH_DTYPES = {name: getattr(torch, of) for name, of in _SAFETENSORS.items()}


def torch_dtype(name: str) -> torch.dtype:
    """That of a name in an index: those that safetensors lacks are called as torch calls them."""
    found: torch.dtype = TORCH_DTYPES.get(name) or getattr(torch, name)
    return found


def from_numpy(array: Any, dtype: str) -> torch.Tensor:
    """What `CheckpointView.read` returned, as it was saved."""
    wanted = torch_dtype(dtype)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


class Scratch:
    """A folder of mapped files, gone when the context is left.

    folder: where it is made; by default that of temporary files.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._around = folder
        self._folder: Path | None = None
        self._count = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if nbytes <= SMALL:
            return torch.zeros(tuple(shape), dtype=dtype)
        flat = torch.from_file(str(self.path()), shared=True, size=nbytes, dtype=torch.uint8)
        return flat.view(dtype).view(tuple(shape))

    def path(self) -> Path:
        """Of a new file."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ckptcore-", dir=self._around))
        self._count += 1
        return self._folder / str(self._count)

    def tensor_of(self, view: CheckpointView, info: TensorInfo) -> torch.Tensor:
        """A tensor of a checkpoint, read portion by portion."""
        tensor = self.empty(info.shape, torch_dtype(info.dtype))
        for box, array in view.portions(info.full_name):
            tensor[box] = from_numpy(array, info.dtype)
        return tensor
