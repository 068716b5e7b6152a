"""Tests that need an accelerator; skipped where there is none."""

import pytest
import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())
