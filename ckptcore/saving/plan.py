"""The save plan: which rank writes which tensors into which files, and where. Pure: equal inputs,
equal plans."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidState
from ..format.digest import content_digest
from ..format.tensorfile import HEADER_LIMIT, StoredTensor, lay_out

__all__ = ["FilePlan", "TensorSpec", "hugging_face_index", "plan_component"]

MAX_FILE_BYTES = 32 << 30
# File systems take no longer names.
NAME_BYTES = 255
# Fewer bytes than this are not worth a file of their own on another rank.
MIN_SHARE_BYTES = 16 << 20


class TensorSpec(NamedTuple):
    """A tensor to be stored: `number` among its component's tensors, name in the file, shape in
    items."""

    number: int
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One tensor file. `places` pairs tensor numbers with their place in the file, in file
    order."""

    name: str
    component: str
    writer: int
    header: bytes
    places: tuple[tuple[int, StoredTensor], ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(place.nbytes for _, place in self.places)


def plan_component(
    key: str,
    tensors: Sequence[TensorSpec],
    writers: Sequence[int],
    label: str = "",
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    header_limit: int = HEADER_LIMIT,
) -> list[FilePlan]:
    """The files of one component (or of one rank's, group's or node's copy, told apart by `label`).

    The bytes are split over `writers`, each of which could write all of them: largest tensor first
    to the rank with the least so far. A tensor stays in one file; a file stays below
    `max_file_bytes` unless one tensor is larger, and its header below `header_limit`. Raises
    InvalidState when a name alone is too long for a header.
    """
    shares = _shares(tensors, writers, MIN_SHARE_BYTES)
    parts: list[tuple[int, list[TensorSpec]]] = []
    for writer in writers:
        parts += [
            (writer, part) for part in _split(key, shares[writer], max_file_bytes, header_limit)
        ]
    files = []
    beginning = _beginning(f"{file_stem(key)}{label}", len(parts))
    for number, (writer, part) in enumerate(parts, 1):
        count = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        header, placed = lay_out((t.stored_name, t.dtype, t.shape) for t in part)
        numbers = {t.stored_name: t.number for t in part}
        places = tuple((numbers[place.name], place) for place in placed)
        files.append(FilePlan(f"{beginning}{count}.safetensors", key, writer, header, places))
    return files


def file_stem(key: str) -> str:
    """A component key as the beginning of a file name; what file names cannot hold everywhere is
    percent-encoded."""
    text = re.sub(
        r"[^A-Za-z0-9_.-]",
        lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "surrogatepass")),
        key,
    )
    text = f"%2E{text[1:]}" if text.startswith(".") else text
    # File systems take 255 bytes, and label and numbering come on top.
    return text if len(text) <= 120 else f"{text[:100]}~{content_digest(text.encode())[:12]}"


def _beginning(name: str, count: int) -> str:
    """What the names of a copy's files begin with, such that they fit wherever files lie, with
    numbers and endings."""
    ending = (
        max(len(f"-{count:05d}-of-{count:05d}.safetensors"), len(".safetensors.index.json"))
        if count > 1
        else 12
    )
    if len(name) + ending <= NAME_BYTES:
        return name
    return f"{name[: NAME_BYTES - 60]}~{content_digest(name.encode())[:12]}"


def hugging_face_index(files: Sequence[FilePlan]) -> bytes:
    """model.safetensors.index.json: which file holds which tensor. Source: transformers' sharded
    checkpoints."""
    weight_map = {place.name: plan.name for plan in files for _, place in plan.places}
    total = sum(place.nbytes for plan in files for _, place in plan.places)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _shares(
    tensors: Sequence[TensorSpec], writers: Sequence[int], min_share: int
) -> dict[int, list[TensorSpec]]:
    total = sum(t.nbytes for t in tensors)
    used = writers[: max(1, min(len(writers), total // min_share))]
    loads = dict.fromkeys(used, 0)
    chosen: dict[int, int] = {}
    for tensor in sorted(tensors, key=lambda t: (-t.nbytes, t.number)):
        writer = min(used, key=lambda w: (loads[w], w))
        loads[writer] += tensor.nbytes
        chosen[tensor.number] = writer
    return {w: [t for t in tensors if chosen[t.number] == w] for w in writers}


def _split(
    key: str, tensors: list[TensorSpec], max_file_bytes: int, header_limit: int
) -> list[list[TensorSpec]]:
    parts: list[list[TensorSpec]] = []
    data = head = 0
    for tensor in tensors:
        need = (
            len(json.dumps(tensor.stored_name, ensure_ascii=False).encode())
            + 100
            + 21 * (len(tensor.shape) + 1)
        )
        if need + 8192 > header_limit:
            raise InvalidState(
                f"component {key!r}: a tensor name of {len(tensor.stored_name):,} characters is "
                "too long",
                component=key,
                key=tensor.stored_name[:100],
            )
        if not parts or data + tensor.nbytes > max_file_bytes or head + need > header_limit:
            parts.append([])
            data, head = 0, 8192
        parts[-1].append(tensor)
        data += tensor.nbytes
        head += need
    return parts
