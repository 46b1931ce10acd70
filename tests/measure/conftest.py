"""What all tests of measurements share."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As ranks have: on small tensors two threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
