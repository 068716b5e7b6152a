"""Bytes on their way to files and back: which chunks go together, and what is a view and what a
copy."""

from __future__ import annotations

import threading

import pytest
import torch

from ckptcore.state.layout import SMALL_BYTES, TensorSource
from ckptcore.storage.chunks import BATCH_CHUNKS, Chunk, DueFile, Scratch, batches, split_up


def chunks_of(*tensors: torch.Tensor) -> list[Chunk[int]]:
    found, start = [], 100
    for number, tensor in enumerate(tensors):
        found.append(Chunk(start, tensor.nbytes, 0, number))
        start += tensor.nbytes
    return found


def fetched(*tensors: torch.Tensor) -> list[bytes]:
    source = TensorSource(dict(enumerate(tensors)))
    return [bytes(buffer) for buffer in source.fetch(chunks_of(*tensors), Scratch())]


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(torch.uint8).numpy().tobytes() if plain.dim() else plain.numpy().tobytes()


def test_neighbours_go_together_up_to_a_size() -> None:
    one, two, far = Chunk(0, 6, 0, "a"), Chunk(6, 4, 0, "b"), Chunk(11, 2, 0, "c")
    assert batches([one, two, far], 10) == [[one, two], [far]]
    assert batches([one, two, far], 9) == [[one], [two], [far]]
    assert batches([], 10) == []
    many = [Chunk(n, 1, 0, "x") for n in range(BATCH_CHUNKS + 1)]
    assert [len(batch) for batch in batches(many)] == [BATCH_CHUNKS, 1]


def test_buffers_are_split_up_into_chunks() -> None:
    chunks = [Chunk(0, 2, 0, 0), Chunk(2, 3, 0, 1), Chunk(5, 1, 0, 2)]
    for buffers in ([b"abcdef"], [b"ab", b"cdef"], [b"abcde", b"f"], [b"ab", b"cde", b"f"]):
        found = split_up(chunks, [memoryview(buffer) for buffer in buffers])
        assert [bytes(part) for part in found] == [b"ab", b"cde", b"f"]
    assert split_up([], []) == []


def test_what_lies_side_by_side_in_memory_is_one_view() -> None:
    block = torch.arange(3 * SMALL_BYTES, dtype=torch.int32)
    tensors = (block[:10], block[10:-1], block[-1:])
    source = TensorSource(dict(enumerate(tensors)))
    (buffer,) = source.fetch(chunks_of(*tensors), Scratch())
    assert bytes(buffer) == raw(block)
    block[0] = 77
    assert buffer[0] == 77  # the memory itself


def test_small_tensors_are_copied_together() -> None:
    small = [torch.full((3,), float(n)) for n in range(4)]
    big = torch.arange(SMALL_BYTES, dtype=torch.float32)
    assert fetched(*small) == [b"".join(raw(t) for t in small)]
    found = fetched(small[0], small[1], big, small[2], small[3])
    assert found == [raw(small[0]) + raw(small[1]), raw(big), raw(small[2]) + raw(small[3])]


@pytest.mark.parametrize(
    "odd",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.ones(1).expand(5),
    ],
    ids=["transposed", "strided", "conjugate", "negative", "expanded"],
)
def test_memory_that_is_not_the_bytes_of_its_items(odd: torch.Tensor) -> None:
    before, after = torch.arange(3.0), torch.arange(5.0, 9.0)
    found = fetched(before, odd, after)
    assert b"".join(found) == raw(before) + raw(odd) + raw(after)


def test_a_part_of_a_tensor() -> None:
    tensor = torch.arange(100, dtype=torch.uint8)
    source = TensorSource({7: tensor})
    found = source.fetch([Chunk(0, 10, 20, 7), Chunk(10, 5, 40, 7)], Scratch())
    assert b"".join(found) == bytes([*range(20, 30), *range(40, 45)])


def test_a_file_is_open_from_its_first_chunk_to_its_last() -> None:
    class File:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    file, made = File(), []
    due = DueFile(lambda: made.append(1) or file, 3)
    assert made == [] and due.opened is None
    assert due.open() is file and due.open() is file and made == [1]
    due.done(2)
    assert file.closed == 0 and due.opened is file
    due.done(1)
    assert file.closed == 1 and due.opened is None


def test_a_file_that_two_threads_want_at_once_is_opened_once() -> None:
    entered, second, release = threading.Event(), threading.Event(), threading.Event()
    made: list[int] = []

    def open_it() -> object:
        made.append(1)
        (second if len(made) > 1 else entered).set()
        assert release.wait(30)
        return file

    file = object()
    due, got = DueFile(open_it, 2), []  # type: ignore[type-var]
    threads = [threading.Thread(target=lambda: got.append(due.open())) for _ in range(2)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    second.wait(0.2)  # never where the second one waits for the first
    release.set()
    for thread in threads:
        thread.join(30)
    assert (made, got) == ([1], [file, file])
