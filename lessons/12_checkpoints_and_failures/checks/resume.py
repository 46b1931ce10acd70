"""A small run that is captured, built anew with other random numbers, and must go on bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import describe
from distlab.grading.variation.draw import Draw, Vary

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
        """Return all that the next steps depend on, by the name of the fault where it is forgotten."""
        moments = [dict(sorted(state.items())) for state in self.optimizer.state_dict()["state"].values()]
        return {
            "weights": [one.detach() for one in self.model.parameters()],
            "buffers": list(self.model.buffers()),
            "moments": [one for state in moments for one in state.values()],
            "schedule": [self.schedule.last_epoch, self.optimizer.param_groups[0]["lr"]],
            "noise": self.generator.get_state(),
            "dropout": torch.get_rng_state(),
            "position": self.position,
        }


def same(one: Any, other: Any) -> bool:
    """Whether two facts are equal bit for bit."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def resumed(fn: Callable[..., Any], *sizes: Any, before: int = BEFORE) -> dict[str, Any]:
    """Capture a run in its middle; let it end; build it anew, restore, and go on."""
    first = SmallRun(0, *sizes)
    losses = first.train(before)
    capture, restore = fn(*first.parts)
    random_before = torch.get_rng_state()
    state = capture(first.position)
    result: dict[str, Any] = {"drew": not torch.equal(random_before, torch.get_rng_state())}
    wanted = first.facts()
    wanted = {
        name: [one.clone() if isinstance(one, Tensor) else one for one in fact] if isinstance(fact, list) else fact
        for name, fact in wanted.items()
    }
    result["losses"] = losses + first.train(AFTER)
    end = first.facts()
    file = io.BytesIO()
    torch.save(state, file)  # later, while training goes on
    try:
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        return result | {"not plain": str(error).strip().splitlines()[0][:150]}
    second = SmallRun(7, *sizes)
    second.train(2)  # so that nothing is as it was
    names = sorted(map(str, state)) if isinstance(state, dict) else []
    second.position = fn(*second.parts)[1](state)
    if isinstance(state, dict) and sorted(map(str, state)) != names:
        result["taken out"] = sorted({*names} ^ {*map(str, state)})
    got = second.facts()
    result["moved"] = [name for name in wanted if not same(got[name], wanted[name])]
    result["of the end"] = [name for name in result["moved"] if same(got[name], end[name])]
    return result | {
        "position": second.position,
        "resumed": second.train(AFTER) if isinstance(second.position, int) else [],
    }


def drive_resume(fn: Callable[..., Any]) -> dict[str, Any]:
    """Resume a run that has made some steps, and look at what was not as before."""
    return resumed(fn)


WORDS = {
    "weights": "the weights are not those that were saved: model.state_dict(), and load_state_dict",
    "buffers": "BatchNorm's running statistics are not those that were saved: state_dict() has them, parameters() not",
    "moments": "the optimizer begins anew, without its moments, and makes another step: save optimizer.state_dict()",
    "schedule": "the schedule is at another step, so the learning rate jumps: save schedule.state_dict()",
    "noise": "the generator of the noise is not where it was: generator.get_state(), and set_state",
    "dropout": "dropout draws other masks: keep torch.get_rng_state(), and torch.set_rng_state() last",
    "position": "restore returned {position}, expected {wanted}: samples are taken twice or never",
}


def judge_resume(evidence: Evidence) -> Iterator[Fault]:
    """All that the rest of the run depends on, taken at one moment, as plain values."""
    result = evidence.results[0]
    if result["drew"]:
        yield Fault("drew", "capture drew random numbers, so saving changes the run: it only looks")
    if "not plain" in result:
        text = "the state cannot be loaded without running code from the file (weights_only=True)"
        yield Fault(
            "not plain", f"{text}: put in state_dict()s, numbers and tensors, no objects ({result['not plain']})"
        )
    if result["of the end"] and "position" not in result["moved"]:
        text = (
            f"what was saved changed while training went on ({', '.join(result['of the end'])}): a state_dict() holds"
        )
        yield Fault(
            "not a copy", f"{text} the tensors themselves, which the next steps change; return copy.deepcopy(...)"
        )
    for name in result["moved"]:
        yield Fault(name, WORDS[name].format(position=describe(result["position"]), wanted=BEFORE * BATCH))
    if "taken out" in result:
        text = f"restore took {', '.join(result['taken out'])} out of the state: who restores once more finds it gone"
        yield Fault("argument changed", f"{text}; leave the caller's state as it is")
    if result["resumed"] != result["losses"][BEFORE:]:
        yield Fault("losses", f"the losses are {result['resumed']}, without a failure {result['losses'][BEFORE:]}")


def budget_resume(evidence: Evidence) -> list[str]:
    """Say what was compared."""
    return [f"{AFTER} steps after the restart, all bits of all losses equal to those without a failure"]


def _draw_resume(draw: Draw) -> tuple[Any, ...]:
    kind = draw.one_of("AdamW", "SGD", "Adam", "RMSprop")
    return draw.integer(0, 6), draw.integer(2, 9), kind, draw.number(0.1, 0.6)


def _use_resume(fn: Callable[..., Any], before: int, *sizes: Any) -> dict[str, Any]:
    return resumed(fn, *sizes, before=before)


RESUME = Vary(_draw_resume, use=_use_resume, num_calls=6, any_state=frozenset({"torch's random state"}))

_SET = 'generator.set_state(state["generator"])'

WRONG_RESUMES = (
    Mutant("takes it out", "argument changed", "leave the caller's state", 1).edit(
        'state["position"]', 'state.pop("position")'
    ),
    Mutant("weights alone", "moments", "without its moments", 1, 42).edit('"optimizer": optimizer, ', ""),
    Mutant("no schedule", "schedule", "the learning rate jumps", 1, 68).edit(', "schedule": schedule}', "}"),
    Mutant("no dropout", "dropout", "other masks", 1, 39).without('torch.set_rng_state(state["torch"])'),
    Mutant("seeded again", "dropout", "other masks", 1).edit(
        'torch.set_rng_state(state["torch"])', "torch.manual_seed(0)"
    ),
    Mutant("no noise", "noise", "not where it was", 1).without(_SET),
    Mutant("one generator", "noise", "not where it was", 1).edit(_SET, 'generator.set_state(state["torch"])'),
    Mutant("from the beginning", "position", "samples are taken twice", 1, 43).edit(
        'return state["position"]', "return 0"
    ),
    Mutant("no copy", "not a copy", "while training went on", 1, "asynchronous saves").edit(
        "copy.deepcopy(state)", "state"
    ),
    Mutant("a flat copy", "not a copy", "copy.deepcopy", 1).edit("copy.deepcopy(state)", "dict(state)"),
    Mutant("parameters alone", "buffers", "running statistics", 1)
    .edit("parts.items()}\n", 'parts.items()}\nstate["model"] = dict(model.named_parameters())\n')
    .edit(
        "part.load_state_dict(state[name])",
        "part.load_state_dict(state[name], **({'strict': False} if part is model else {}))",
    ),
    Mutant("objects", "not plain", "without running code", 1).edit(
        "parts.items()}\n", 'parts.items()}\nstate["optimizer"] = optimizer\n'
    ),
)
