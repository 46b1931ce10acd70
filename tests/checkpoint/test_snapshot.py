"""The order of a snapshot's copies on a GPU, by a double of torch.cuda: after the last update, before the writer."""

import pytest
import torch
from fake_cuda import fake_gpu

from distlab.checkpoint import snapshot
from distlab.checkpoint.snapshot import Snapshot
from distlab.comm import device
from distlab.comm.device import CopyStream


def races_of(monkeypatch, fault=None):
    """Update in a stream of its own, take a snapshot, copy it in a different stream as a thread does, and read it."""
    with fake_gpu() as gpu, monkeypatch.context() as patch:
        if fault:
            patch.setattr(snapshot.device, fault, lambda *_: None)
        weights, small = torch.zeros(300, 300), torch.zeros(3)
        taken = Snapshot()
        with CopyStream(torch.device("cpu")).after_current():
            weights.add_(1)
            small.add_(1)
            state = taken.begin({"weights": weights, "small": small})
        assert gpu.waits == [], "the host goes on to train"
        taken.finish()
        total = (state["weights"] + 0).sum() + (state["small"] + 0).sum()
        assert total == 300 * 300 + 3
        return gpu.races, gpu.pinned


def test_copies_come_after_the_update_and_before_the_writer(monkeypatch):
    assert races_of(monkeypatch) == ([], 2)


@pytest.mark.parametrize("fault", ["wait_in_stream", "wait_for_event"])
def test_the_double_sees_a_missing_wait(monkeypatch, fault):
    races, _ = races_of(monkeypatch, fault)
    assert races
    assert device.wait_in_stream is snapshot.device.wait_in_stream, "put back"
