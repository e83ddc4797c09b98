"""Every test starts from the same random numbers, whichever tests ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
