"""An update of LARS and of LAMB against pytorch_optimizer's, with options under which both make the same update.

The bar: at most their time, on many small tensors (a deep GPT's) and on a few large ones. The peers are their batched
implementation (their default) and the one that goes tensor by tensor (foreach=False). Only `step()` is timed;
gradients are put back before each, since theirs overwrites them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytorch_optimizer
import torch
from _rows import Row, compare, noise
from _script import backend_of, run_script
from torch import Tensor, nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm.device import synchronize
from distlab.large_batch import LAMB, LARS, Trust
from distlab.measure import MIN_BLOCKS, interleave

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
DECAY = 0.01
LAMB_TRUST = Trust(adapt="all", max_weight_norm=10.0, ratio_eps=1e-6)  # what theirs does


def their_lamb(foreach: bool | None, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return their LAMB as the paper has it: decay inside the ratio, no bias correction."""
    options = {"weight_decouple": False, "adam_debias": True, "foreach": foreach}
    return pytorch_optimizer.Lamb(parameters, lr=1e-4, weight_decay=DECAY, **options)


OURS: dict[str, Make] = {
    "LARS": lambda ps: LARS(ps, 0.1, weight_decay=DECAY, lr_in_buffer=False),
    "LAMB": lambda ps: LAMB(ps, 1e-4, weight_decay=DECAY, bias_correction=False, trust=LAMB_TRUST),
}
THEIRS: dict[str, Callable[[bool | None], Make]] = {
    "LARS": lambda foreach: lambda ps: pytorch_optimizer.LARS(ps, lr=0.1, weight_decay=DECAY, foreach=foreach),
    "LAMB": lambda foreach: partial(their_lamb, foreach),
}


def small_tensors(device: torch.device) -> list[nn.Parameter]:
    """Return the parameters of a deep, narrow GPT: some 150 tensors, most of them vectors."""
    config = GPTConfig(num_layers=12, num_heads=4, hidden_size=64)
    return list(GPT(config, torch.Generator().manual_seed(0)).to(device).parameters())


def large_tensors(device: torch.device) -> list[nn.Parameter]:
    """Return four matrices of four million elements each."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(2048, 2048, generator=generator) / 45).to(device)) for _ in range(4)]


SETS = {"the small tensors of a deep GPT": small_tensors, "four matrices of 2048 x 2048": large_tensors}


class Program:
    """An optimizer with parameters of its own, timed in blocks."""

    def __init__(self, make: Make, parameters: list[nn.Parameter]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = parameters
        self.gradients = [torch.randn(p.shape, generator=generator).to(p.device) / 100 for p in parameters]
        self.optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)

    def block(self, num_steps: int) -> float:
        """Return the seconds of an update, the mean of some."""
        seconds = 0.0
        for _ in range(num_steps):
            torch._foreach_copy_([p.grad for p in self.parameters if p.grad is not None], self.gradients)
            self._wait()
            begin = time.perf_counter()
            self.optimizer.step()
            self._wait()
            seconds += time.perf_counter() - begin
        return seconds / num_steps

    def _wait(self) -> None:
        synchronize(self.parameters[0].device)

    def weights(self) -> Tensor:
        """Return all weights in one row."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield, for each optimizer and set of tensors: the two bars and the noise.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    backend_of(device, 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a rank
    try:
        for name in OURS:
            for what, make_set in SETS.items():
                yield from rows_of(name, what, lambda make_set=make_set: make_set(torch.device(device)), quick=quick)
    finally:
        torch.set_num_threads(num_threads)


def rows_of(name: str, what: str, parameters: Callable[[], list[nn.Parameter]], *, quick: bool) -> Iterator[Row]:
    """Time one optimizer on one set of tensors; first see that all programs make the same updates."""
    makes: Sequence[Make] = [OURS[name], *(THEIRS[name](foreach) for foreach in (None, False, None))]
    programs = [Program(make, parameters()) for make in makes]
    steps = 2 if quick else 20 if len(programs[0].parameters) > 10 else 3
    for program in programs:
        program.block(3)  # first steps make the state
    gaps = [float((program.weights() - programs[0].weights()).abs().max()) for program in programs]
    assert max(gaps) < 1e-5, f"{name}: the updates differ by {gaps}"
    blocks = 3 if quick else MIN_BLOCKS + 10
    ours, batched, single, again = interleave([partial(program.block, steps) for program in programs], blocks)
    kind = programs[0].parameters[0].device.type
    claim = f"a {name} update of {what} ({kind}) against pytorch_optimizer's"
    yield compare(f"{claim}, batched as it comes", ours, batched)
    yield compare(f"{claim}, foreach=False", ours, single)
    yield noise(claim, again, batched)


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True)
