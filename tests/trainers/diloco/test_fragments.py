"""Fragments hold every parameter once, the same wherever they are computed."""

from __future__ import annotations

import pytest
import torch
from ckpt_trainers.arguments import GPTArguments, InvalidArgument
from ckpt_trainers.diloco.fragments import split_layout
from ckpt_trainers.diloco.outer import named_parameters
from ckpt_trainers.diloco.wire import Layout
from ckpt_trainers.model import ByteGPT


def layout(blocks: int) -> Layout:
    model = ByteGPT(GPTArguments(n_layer=blocks, n_head=2, n_embd=8, block_size=8))
    return Layout.of(named_parameters(model))


@pytest.mark.parametrize("blocks", [1, 4, 12])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_every_parameter_is_in_one_fragment(blocks: int, number: int) -> None:
    whole = layout(blocks)
    if number > blocks + 4:  # embedding, position, two of the norm
        pytest.skip("fewer parts")
    parts = split_layout(whole, number)
    names = [spec.name for part in parts for spec in part.specs]
    assert sorted(names) == sorted(spec.name for spec in whole.specs)
    assert len(parts) == number and all(part.specs for part in parts)


def test_blocks_stay_whole_and_are_dealt_out_in_strides() -> None:
    parts = split_layout(layout(12), 3)
    for number, part in enumerate(parts):
        blocks = {name.split(".")[1] for name in (s.name for s in part.specs) if "blocks" in name}
        assert blocks == {str(n) for n in range(12) if n % 3 == number}


def test_without_blocks_sizes_are_alike() -> None:
    tensors = {f"w{n}": torch.empty(n + 1, 10) for n in range(9)}
    sizes = [sum(s.elements for s in part.specs) for part in split_layout(Layout.of(tensors), 3)]
    assert sizes == [160, 150, 140]


def test_more_fragments_than_parts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"num_fragments=6: the model has 5 parts"):
        split_layout(layout(1), 6)
