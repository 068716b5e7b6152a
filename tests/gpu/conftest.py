"""Tests that need an accelerator; skipped where there is none, but imported everywhere."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="there is no accelerator"))


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())
