"""Files of a save in the background have the mode that an ordinary program gives them."""

import os
import stat

import pytest
import torch

from ckptcore import CheckpointManager


@pytest.mark.parametrize(("mask", "folder", "file"), [(0o022, 0o755, 0o644), (0o007, 0o770, 0o660)])
def test_b50_files_and_folders_follow_the_umask(tmp_path, mask, folder, file):
    before = os.umask(mask)
    try:
        with CheckpointManager(tmp_path / "run") as ckpt:
            ckpt.save_async(1, {"model": {"w": torch.ones(1000)}, "progress": {"step": 1}}).result(
                60
            )
        after = os.umask(mask)
    finally:
        os.umask(before)
    assert after == mask
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    modes = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in made}
    assert modes == {path.relative_to(tmp_path): folder if path.is_dir() else file for path in made}
    assert len(made) == 5
