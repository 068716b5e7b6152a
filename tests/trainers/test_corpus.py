from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from ckpt_trainers.arguments import DataNotFound, InvalidArgument
from ckpt_trainers.data.corpus import ByteWindows, find_files, read_corpus, split_corpus
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=20)
@given(st.integers(2, 300), st.integers(1, 40))
def test_windows_follow_one_another_and_labels_are_one_byte_on(length: int, block: int) -> None:
    corpus = torch.arange(length).to(torch.uint8)
    windows = ByteWindows(corpus, block)
    assert len(windows) == (length - 1) // block
    for i in range(len(windows)):
        item = windows[i]
        assert item["input_ids"].tolist() == [j % 256 for j in range(i * block, (i + 1) * block)]
        assert item["labels"].tolist() == [
            j % 256 for j in range(i * block + 1, (i + 1) * block + 1)
        ]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_no_byte_is_trained_on_and_validated_on() -> None:
    corpus = torch.arange(200, dtype=torch.uint8)
    train, validation = split_corpus(corpus, 8, validation=0.2)
    assert torch.equal(torch.cat([train.corpus, validation.corpus]), corpus)
    assert len(validation.corpus) == 40
    with pytest.raises(InvalidArgument, match=r"17 bytes.*block_size"):
        split_corpus(corpus[:17], 8)
    assert [len(part) for part in split_corpus(corpus[:18], 8)] == [1, 1]


def test_the_default_corpus_is_the_standard_library() -> None:
    files = find_files()
    library = Path(sysconfig.get_path("stdlib"))
    assert library / "argparse.py" in files
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in files)
    names = [file.relative_to(library).as_posix() for file in files]
    assert names == sorted(names)
    corpus = read_corpus(max_bytes=100_000)
    assert corpus.dtype == torch.uint8 and len(corpus) == 100_000
    first = files[0].read_bytes()
    assert bytes(corpus[: len(first)].tolist()) == first


def test_data_takes_files_folders_and_globs_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "a.txt", "c[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(*entries: str) -> list[str]:
        return [
            file.relative_to(tmp_path).as_posix()
            for file in find_files([str(tmp_path / e) for e in entries])
        ]

    assert names("b") == ["b/1.txt", "b/2.txt"]
    assert names("**/*.txt") == ["a.txt", "b/1.txt", "b/2.txt", "c[1].txt"]
    assert names("b/2.txt", "b") == ["b/2.txt", "b/1.txt"]
    assert names("c[1].txt") == ["c[1].txt"]  # a file of that very name goes before the pattern
    assert bytes(read_corpus([str(tmp_path / "b")]).tolist()) == b"b/1.txtb/2.txt"
    assert bytes(read_corpus([str(tmp_path / "b")], max_bytes=9).tolist()) == b"b/1.txtb/"
    with pytest.raises(DataNotFound, match="nothing-here") as raised:
        names("nothing-here")
    assert raised.value.path == str(tmp_path / "nothing-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFound, match="empty"):
        names("empty")
