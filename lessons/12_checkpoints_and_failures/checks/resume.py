"""A small run that is captured, built anew with other random numbers, and must go on bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant

BEFORE, AFTER, BATCH = 5, 4, 6


class SmallRun:
    """A model with dropout and running statistics, an optimizer, a schedule and noise on the data."""

    def __init__(self, seed: int, width: int = 8, kind: str = "AdamW", drop: float = 0.3) -> None:
        torch.manual_seed(seed)
        layers = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(drop), nn.Linear(width, 2)
        self.model = nn.Sequential(*layers)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.05, **options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.position = 0

    @property
    def parts(self) -> tuple[Any, ...]:
        """What `resumable` takes."""
        return self.model, self.optimizer, self.schedule, self.generator

    def train(self, num_steps: int) -> list[float]:
        """Make steps and return their losses."""
        losses = []
        for _ in range(num_steps):
            x = torch.linspace(0, 1, BATCH * 5).view(BATCH, 5) + self.position / 50
            loss = self.model(x + 0.1 * torch.randn(x.shape, generator=self.generator)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.position += BATCH
            losses.append(float(loss.detach()))
        return losses

    def facts(self) -> dict[str, Any]:
        """Return a copy of all that the next steps depend on."""
        moments = [dict(sorted(state.items())) for state in self.optimizer.state_dict()["state"].values()]
        found = {
            "the weights": [one.detach() for one in self.model.parameters()],
            "the running statistics": list(self.model.buffers()),
            "the optimizer's moments": [one for state in moments for one in state.values()],
            "the schedule's step and rate": [self.schedule.last_epoch, self.optimizer.param_groups[0]["lr"]],
            "the generator of the noise": self.generator.get_state(),
            "torch's generator": torch.get_rng_state(),
        }
        return copy.deepcopy(found)


def same(one: Any, other: Any) -> bool:
    """Whether two facts are equal bit for bit."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def _use_resume(fn: Callable[..., Any], before: int, *sizes: Any) -> dict[str, Any]:
    """Capture a run in its middle; let it end; build it anew, restore, and go on."""
    first = SmallRun(0, *sizes)
    first.train(before)
    capture, restore = fn(*first.parts)
    random_before = torch.get_rng_state()
    state = capture(first.position)
    drew = not torch.equal(random_before, torch.get_rng_state())
    wanted = first.facts()
    losses = first.train(AFTER)
    end = first.facts()
    file = io.BytesIO()
    torch.save(state, file)  # later, while training goes on
    result: dict[str, Any] = {"capture draws random numbers": drew, "the state is plain": True}
    result |= dict.fromkeys([*wanted, "the position", "restore leaves the state's names", "losses afterwards"])
    try:
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        return result | {"the state is plain": str(error).strip().splitlines()[0][:78]}
    second = SmallRun(7, *sizes)
    second.train(2)  # so that nothing is as it was
    names = sorted(map(str, state)) if isinstance(state, dict) else []
    second.position = fn(*second.parts)[1](state)
    for name, fact in second.facts().items():
        later = "as later, when training had gone on" if same(fact, end[name]) else "different"
        result[name] = "as saved" if same(fact, wanted[name]) else later
    result["the position"] = second.position
    result["restore leaves the state's names"] = not isinstance(state, dict) or sorted(map(str, state)) == names
    resumed = second.train(AFTER) if isinstance(second.position, int) else []
    result["losses afterwards"] = "as without a failure" if resumed == losses else "different"
    return result


drive_resume = Cases({f"a run that is resumed after {BEFORE} steps": (BEFORE,)}, _use_resume)


def budget_resume(evidence: Evidence) -> list[str]:
    """Say what was compared."""
    return [f"{AFTER} steps after the restart, all bits of all losses equal to those without a failure"]


def _draw_resume(draw: Draw) -> tuple[Any, ...]:
    kind = draw.one_of("AdamW", "SGD", "Adam", "RMSprop")
    return draw.integer(0, 6), draw.integer(2, 9), kind, draw.number(0.1, 0.6)


vary_resume = Vary(_draw_resume, use=_use_resume, num_calls=6, any_state=frozenset({"torch's random state"}))

_SET = 'generator.set_state(state["generator"])'

_MASKS = "dropout draws other masks; keep torch.get_rng_state(), and torch.set_rng_state() last"
_NOISE = "the generator of the noise is not where it was; generator.get_state(), and set_state"
_TENSORS = (
    "what was saved changed while training went on; a state_dict() holds the tensors themselves, which the next steps "
    "change, so return copy.deepcopy(...)"
)

WRONG_RESUME = (
    Mutant(
        "takes it out", "taken out", "restore takes a part out of the state, and who restores again finds it gone", 1
    ).edit('state["position"]', 'state.pop("position")'),
    Mutant(
        "weights alone", "moments", "the optimizer begins without its moments: save optimizer.state_dict()", 1, 42
    ).edit('"optimizer": optimizer, ', ""),
    Mutant("no schedule", "schedule", "the learning rate jumps: save schedule.state_dict() as well", 1, 68).edit(
        ', "schedule": schedule}', "}"
    ),
    Mutant("no dropout", "dropout", _MASKS, 1, 39).without('torch.set_rng_state(state["torch"])'),
    Mutant("seeded again", "dropout", _MASKS, 1).edit('torch.set_rng_state(state["torch"])', "torch.manual_seed(0)"),
    Mutant("no noise", "noise", _NOISE, 1).without(_SET),
    Mutant("one generator", "noise", _NOISE, 1).edit(_SET, 'generator.set_state(state["torch"])'),
    Mutant(
        "from the beginning", "position", "return the position that was saved, or samples are taken twice", 1, 43
    ).edit('return state["position"]', "return 0"),
    Mutant("no copy", "not a copy", _TENSORS, 1, "asynchronous saves").edit("copy.deepcopy(state)", "state"),
    Mutant("a flat copy", "not a copy", _TENSORS, 1).edit("copy.deepcopy(state)", "dict(state)"),
    Mutant("parameters alone", "buffers", "BatchNorm's running statistics are no parameters: save state_dict()", 1)
    .edit("parts.items()}\n", 'parts.items()}\nstate["model"] = dict(model.named_parameters())\n')
    .edit(
        "part.load_state_dict(state[name])",
        "part.load_state_dict(state[name], **({'strict': False} if part is model else {}))",
    ),
    Mutant(
        "no model", "weights", "the weights are not those that were saved; model.state_dict(), and load_state_dict", 1
    ).edit('"model": model, ', ""),
    Mutant(
        "objects", "not plain", "it holds objects, which run code when loaded: put in state_dict()s and numbers", 1
    ).edit("parts.items()}\n", 'parts.items()}\nstate["optimizer"] = optimizer\n'),
    Mutant("draws a number", "drew", "capture draws random numbers, so saving changes the run; it only looks", 1).edit(
        "return copy.deepcopy(state)", "torch.rand(1)\nreturn copy.deepcopy(state)"
    ),
)
