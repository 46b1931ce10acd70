"""What data-parallel training exchanges once: at construction, and where a rank has something to tell."""

import pytest
import torch
import torch.distributed as dist
from equal import calls_of
from torch import nn

from distlab.blocks.gradients.gradient_status import find_faults, gather_reports
from distlab.data_parallel import DistributedSampler, HorovodOptimizer, convert_sync_batchnorm

AGREEMENT = ("all_gather", 40)


@pytest.mark.on_ranks(2)
def test_what_is_built_agrees_for_40_bytes():
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {
        "sampler": calls_of(lambda: DistributedSampler(range(10))),
        "sampler, told": calls_of(lambda: DistributedSampler(range(10), rank=0, world_size=2)),
        "batch norm": calls_of(lambda: convert_sync_batchnorm(nn.BatchNorm1d(2))),
        "horovod": calls_of(lambda: HorovodOptimizer(optimizer, model.named_parameters())),
    }
    assert found["sampler"] == found["batch norm"] == found["horovod"] == [AGREEMENT]
    assert found["sampler, told"] == []


def test_an_epoch_makes_one_permutation(monkeypatch):
    made, real = [], DistributedSampler.order
    monkeypatch.setattr(DistributedSampler, "order", lambda sampler: made.append(sampler.epoch) or real(sampler))
    sampler = DistributedSampler(range(10), rank=0, world_size=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        list(sampler)
    assert made == [0, 1]


@pytest.mark.on_ranks(2)
def test_reports_are_one_gather_and_sentences_come_where_there_are_any():
    words = ["the loss is odd"] if dist.get_rank() else []
    quiet, told = calls_of(lambda: gather_reports([0, 1, 2], [])), calls_of(lambda: gather_reports([0, 1, 2], words))
    assert quiet == [("all_gather", 3 + 1)]
    assert told[:1] == quiet
    assert {op for op, _ in told} == {"all_gather"}
    assert len(told) == 3  # lengths of the sentences, and the sentences


@pytest.mark.on_ranks(2)
def test_faults_are_found_by_one_small_all_reduce():
    assert calls_of(lambda: find_faults([0, 0, 0], ["a", "b", "c"], None, unused="zero", step=1)) == [
        ("all_reduce", 6 * 3)
    ]
