"""Pickles of other libraries, read without executing them: every name in them must be on a list."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata

from ..errors import InvalidState

__all__ = ["Foreign", "Refused", "load_bytes", "load_file", "load_metadata"]


class Refused(InvalidState):
    """A file that could not be read without executing what it names, or not at all."""


def _numpy_names() -> list[Any]:
    """What the arrays and scalars in random states are made of."""
    rebuild = np.core.multiarray if int(np.__version__.split(".")[0]) < 2 else np._core.multiarray  # type: ignore[attr-defined]
    kinds = [type(np.dtype(kind)) for kind in ("u4", "i4", "u8", "i8", "f4", "f8", "u1", "b1")]
    return [rebuild._reconstruct, rebuild.scalar, np.ndarray, np.dtype, *kinds]


def load_file(path: Path, name: str | None = None) -> Any:
    """What `torch.save` wrote, its tensors mapped from the file where its form allows. name: for
    the message, by default the path. Raises Refused."""
    about = path if name is None else Path(name)
    return _load(str(path), about, lambda source, **how: torch.load(source, **how))


def load_bytes(data: bytes, name: str) -> Any:
    """The same of bytes. name: for the message."""
    return _load(io.BytesIO(data), Path(name), lambda source, **how: torch.load(source, **how))


class Foreign:
    """In the place of an object whose class is not read. It takes whatever a pickle gives to the
    class that it stands for, and does nothing with it."""

    of = ""  # the name of that class

    def __new__(cls, *_: Any, **__: Any) -> Foreign:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")
CLASSES = 100  # of others that a file may name


def _load(source: Any, path: Path, load: Callable[..., Any]) -> Any:
    """Objects of classes that are not read come back as Foreign: the rest of the file is good."""
    known: list[Any] = [*_numpy_names()]
    while True:
        try:
            return _loaded(source, load, known)
        except OSError:
            raise
        except Exception as error:  # torch, zip and pickle raise all kinds for what is no such file
            unknown = _UNKNOWN.search(str(error))
            if unknown is not None and len(known) < CLASSES:
                known.append((type("Foreign", (Foreign,), {"of": unknown[1]}), unknown[1]))
                continue
            what = str(error).split("\n")
            named = next((line for line in what if "GLOBAL" in line or "Unsupported" in line), "")
            reason = f" ({named.strip()[:300]})" if named else ""
            raise Refused(
                f"{path} is not read: it is no file of torch.save, or names more than tensors and "
                f"plain values, which would be executed{reason}"
            ) from None


def _loaded(source: Any, load: Callable[..., Any], known: list[Any]) -> Any:
    how: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    with torch.serialization.safe_globals(known), warnings.catch_warnings():
        # Of a pickle protocol that torch.save does not write: what is not read is refused anyway.
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
        if isinstance(source, str):
            try:
                return load(source, mmap=True, **how)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
        else:
            source.seek(0)
        return load(source, **how)


# What a `.metadata` of torch.distributed.checkpoint may name.
_METADATA: dict[tuple[str, str], Any] = {
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in (
            (
                dcp_metadata,
                (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                ),
            ),
            (dcp_filesystem, ("_StorageInfo", "_StoragePrefix")),
        )
        for name in names
        if hasattr(module, name)
    },
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib", "PureWindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
    },
}


class _Only(pickle.Unpickler):
    """Finds what is on the list, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA:
            raise Refused(f"it names {module}.{name}, which is not read: it would be executed")
        return _METADATA[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("it refers to objects elsewhere")


def load_metadata(path: Path) -> dcp_metadata.Metadata:
    """The `.metadata` of a folder of torch.distributed.checkpoint. Raises Refused."""
    try:
        found = _Only(io.BytesIO(path.read_bytes())).load()
    except Refused as error:
        raise Refused(f"{path}: {error.message}") from None
    except OSError:
        raise
    except Exception as error:  # a pickle that is cut short or changed raises anything
        raise Refused(
            f"{path} is no metadata of torch.distributed.checkpoint ({type(error).__name__}: "
            f"{error})"
        ) from None
    if not isinstance(found, dcp_metadata.Metadata):
        raise Refused(f"{path} is no metadata of torch.distributed.checkpoint")
    return found
