"""A file with right answers to the trial lesson in lessons/91_trial."""

GOOD = """
import torch.distributed as dist

def mean(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()

def double(values, *, times=2):
    return [times * value for value in values]
"""
