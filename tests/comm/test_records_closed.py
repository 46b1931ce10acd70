"""The files of records are closed when nobody reads them any more: after a run that went well, and one that did not."""

import gc
import warnings

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, run


def sum_up(fails):
    dist.all_reduce(torch.ones(2))
    if fails:
        raise RuntimeError("no")


def mismatch():
    """Ranks that make other calls: the record is read for the text."""
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.parametrize("how", ["well", "raises", "mismatch"])
def test_a_run_leaves_no_file_open(how):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if how == "well":
            run(lambda: sum_up(False), 2, echo=False)
        else:
            with pytest.raises(RankError):
                run((lambda: sum_up(True)) if how == "raises" else mismatch, 2, echo=False)
        gc.collect()
    assert [str(one.message) for one in seen if issubclass(one.category, ResourceWarning)] == []
