"""Faults that tests of elastic runs need beside signals: an exception, a slow rank, flipped bits, a full disk.

- "exception": the rank raises. "slow": it sleeps.
- "flip", "flip gradient", "flip moment": one bit changes, of its weights, of a gradient just before the optimizer reads
  it (so after replicas have averaged it), or of the optimizer's state just after an update. The mark says which bit.
- "disk": its next save finds no room on the disk.
"""

import errno
import os
import random
import time

import torch

from distlab.checkpoint import files
from distlab.checkpoint.parts import moments_of
from distlab.elastic import Fault, Faults

MORE = ("exception", "slow", "flip", "flip gradient", "flip moment", "disk")


class FullDisk:
    """Stands for `os` where checkpoints are written, until a first write has failed."""

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, *_):
        vars(files)["os"] = os
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class MoreFaults(Faults):
    """A plan with faults of these kinds too; bits flip in a model and its optimizer."""

    def __init__(self, plan, directory, model=None, optimizer=None):
        super().__init__([fault for fault in plan if fault[0] not in MORE], directory / "signals")
        self.more, self.model, self.optimizer = [Fault(*fault) for fault in plan if fault[0] in MORE], model, optimizer
        self.marks = directory / "more"

    def before_step(self, number, rank, world_size):
        super().before_step(number, rank, world_size)
        for index, fault in enumerate(self.more):
            self.marks.mkdir(parents=True, exist_ok=True)
            mark = self.marks / f"fault-{index}"
            if fault.step <= number and fault.rank % world_size == rank and not mark.exists():
                mark.touch()
                self.happen(fault, mark)

    def happen(self, fault, mark):
        if fault.kind == "exception":
            raise RuntimeError(f"{fault} happens here")
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "disk":
            vars(files)["os"] = FullDisk()
        elif fault.kind == "flip":
            mark.write_text(flip_bit(dict(self.model.named_parameters()), str(fault)))
        else:
            self.flip_in_update(fault, mark)

    def flip_in_update(self, fault, mark):
        waiting = [True]  # no hook can remove itself while torch goes through them

        def hook(optimizer, *_):
            found = moments_of({"optimizer": optimizer})
            if fault.kind == "flip gradient":
                named = self.model.named_parameters()
                found = {f"the gradient of {name}": one.grad for name, one in named if one.grad is not None}
            if waiting and found:
                waiting.clear()
                mark.write_text(flip_bit(found, str(fault)))

        is_before = fault.kind == "flip gradient"
        register = self.optimizer.register_step_pre_hook if is_before else self.optimizer.register_step_post_hook
        register(hook)


@torch.no_grad()
def flip_bit(found, seed):
    """Flip one bit of one of these tensors, and say which one."""
    chance = random.Random(seed)
    name = chance.choice([name for name, tensor in found.items() if tensor.numel()])
    tensor = found[name]
    place = tuple(chance.randrange(size) for size in tensor.shape)
    element, byte, bit = tensor[place].reshape(1).clone(), chance.randrange(tensor.element_size()), chance.randrange(8)
    element.view(torch.uint8)[byte] ^= 1 << bit
    tensor[place] = element[0]
    return f"bit {8 * byte + bit} of element {list(place)} of {name}"
