"""What replicas on an accelerator are compared by, computed where they are: nothing but the result
is copied to the host.

A tensor's bytes are taken as 32-bit words in rows of 2^20. Row by row the words are multiplied with
fixed random odd 64-bit numbers and added, modulo 2^64: a change of one word always changes the sum,
other changes go unseen with a chance of about 2^-33 at worst. The host hashes the sums.
(Multilinear hashing: Carter and Wegman 1979, Lemire and Kaser 2013.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..format.digest import content_hash
from ..state.layout import words

ROW_WORDS = 1 << 20
ROWS_AT_ONCE = 16
SAMPLES = 16
SAMPLE_ITEMS = 128


def on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def fingerprints(tensors: Sequence[torch.Tensor], *, sampled: bool) -> list[bytes]:
    """One for each of `tensors`, which are on one or more accelerators. sampled: of items spread
    over each, both ends included; else of every byte."""
    batches: dict[Any, list[tuple[int, list[torch.Tensor]]]] = {}
    result = [b""] * len(tensors)
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            parts = _samples(tensor) if sampled else [_sums(tensor)]
            kind = parts[0].device, parts[0].dtype, parts[0].ndim
            batches.setdefault(kind, []).append((number, parts))
        for batch in batches.values():
            # One kernel and one copy to the host for all of them.
            items = torch.cat([part for _, parts in batch for part in parts]).cpu().numpy()
            data, at = items.reshape(-1).view("uint8").data, 0
            for number, parts in batch:
                nbytes = sum(part.nbytes for part in parts)
                result[number] = content_hash(data[at : at + nbytes])
                at += nbytes
    return result


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20261128)
    words = torch.randint(-(2**63), 2**63 - 1, (ROW_WORDS,), generator=generator, device="cpu")
    return words.bitwise_or_(1).to(device)


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """One 64-bit sum for each row of words, and one for the bytes that are left over."""
    flat = words(tensor).reshape(-1).view(torch.uint8)
    whole = flat.numel() // 4 * 4
    row = (
        flat[:whole].view(torch.int32)
        if flat.data_ptr() % 4 == 0
        else flat[:whole].clone().view(torch.int32)
    )
    weights = _multipliers(tensor.device)
    sums = []
    step = ROW_WORDS * ROWS_AT_ONCE
    for at in range(0, row.numel(), step):
        some = row[at : at + step]
        full = some.numel() // ROW_WORDS
        if full:
            sums.append((some[: full * ROW_WORDS].view(full, ROW_WORDS) * weights).sum(1))
        if rest := some.numel() - full * ROW_WORDS:
            sums.append((some[-rest:] * weights[:rest]).sum().reshape(1))
    if flat.numel() > whole:
        tail = flat[whole:].to(torch.int64)
        sums.append((tail * weights[: tail.numel()]).sum().reshape(1))
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=tensor.device)


def _samples(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Items of SAMPLES places of equal distance, and the last ones, as rows of words; a small
    tensor as it is."""
    flat = words(tensor).reshape(-1)
    if flat.numel() <= SAMPLES * SAMPLE_ITEMS:
        return [flat]
    distance = (flat.numel() - SAMPLE_ITEMS) // (SAMPLES - 1)
    spread = flat.as_strided((SAMPLES, SAMPLE_ITEMS), (distance, 1), flat.storage_offset())
    return [spread, flat[-SAMPLE_ITEMS:].view(1, SAMPLE_ITEMS)]
