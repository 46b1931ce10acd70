"""Equal starts, and the mean of gradients: one all-reduce per parameter, or one for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Fault, Mutant

TAKES_NO_GROUP = {"sub-group": "takes no group"}
LEAVES_OUT = {"layout": "torch.distributed sends contiguous tensors only"} | TAKES_NO_GROUP
SAME_MODEL = LEAVES_OUT | {"unequal ranks": "all ranks hold the same model"}


class Net(nn.Module):
    """A shared (tied) weight, a frozen layer, buffers, and a branch that is last, so that a rank may leave it out.

    No rank has what a different one has; whole numbers where a tensor holds such.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.norm.register_buffer("running_var", torch.ones(4), persistent=False)
        self.second = nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.branch = nn.Linear(5, 2)
        self.double()
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                own = seeded(rank, *(tensor.shape or (1,)), purpose=name).mul(10)
                tensor.copy_(own.view_as(tensor).to(tensor.dtype))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in words."""
    parameters = {f"parameter {name}": tensor for name, tensor in module.named_parameters()}
    return parameters | {f"buffer {name}": tensor for name, tensor in module.named_buffers()}


def gradient_of(parameter: nn.Parameter) -> Tensor | str:
    """Return a copy of a parameter's gradient, or say that it has none."""
    return "no gradient" if parameter.grad is None else parameter.grad.detach().clone()


def _ranks(rank: int, n: int) -> dict[str, tuple[int, int]]:
    return {"": (rank, n)}


def _use_broadcast(fn: Callable[[nn.Module], Any], rank: int, n: int) -> dict[str, Any]:
    """Give every rank parameters and buffers of its own; say what they are afterwards."""
    net = Net(rank)
    objects = [id(tensor) for tensor in net.parameters()]
    fn(net)
    is_same = objects == [id(tensor) for tensor in net.parameters()]
    return state_of(net) | {"its parameters": "those that were there" if is_same else "new ones"}


def _use_average(fn: Callable[[nn.Module], Any], rank: int, n: int) -> dict[str, Any]:
    """Give every rank gradients of its own, and none to the branch on rank 0 if there are others."""
    net = Net(rank)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and not (name.startswith("branch") and rank == 0 and n > 1):
            parameter.grad = seeded(rank, *parameter.shape, purpose=name)
    fn(net)
    return {f"gradient of {name}": gradient_of(parameter) for name, parameter in net.named_parameters()} | state_of(net)


drive_broadcast = Cases(_ranks, _use_broadcast, most_bytes=0)
drive_average = Cases(_ranks, _use_average, most_bytes=0)
drive_flat = Cases(_ranks, _use_average, needs="one all-reduce of all gradients, as a ring,")


def _draw_module(draw: Draw, *, with_gradients: bool) -> tuple[nn.Module]:
    """Return a module of 1 to 5 parameters of any shape, some frozen, with buffers; ranks differ in all numbers."""
    dtype, module = draw.dtype("float64", "float32", "bfloat16"), nn.Module()
    for index in range(draw.integer(1, 5)):
        shape, is_frozen = draw.shape(), index > 0 and draw.integer(0, 3) == 0
        parameter = nn.Parameter(draw.tensor(*shape, dtype=dtype), requires_grad=not is_frozen)
        gradient, has_one = draw.tensor(*shape, dtype=dtype), draw.own(0, 4) > 0
        if with_gradients and not is_frozen and has_one:
            parameter.grad = gradient
        module.register_parameter(f"weight_{index}", parameter)
    module.register_buffer("running", draw.tensor(3, dtype=dtype))
    module.register_buffer("count", draw.tensor(dtype=torch.int64))
    module.register_buffer("unsaved", draw.tensor(2, 2, dtype=dtype), persistent=False)
    return (module,)


vary_broadcast = Vary(lambda draw: _draw_module(draw, with_gradients=False), left_out=SAME_MODEL)
vary_average = vary_flat = Vary(lambda draw: _draw_module(draw, with_gradients=True), left_out=LEAVES_OUT)


def _names_of_calls(evidence: Evidence, rank: int) -> tuple[int, str]:
    """Return how often a rank called, and what, such as "2 all_reduce"; the barriers of a check do not count."""
    made = [call.op for call in calls(evidence, rank) if call.op != "barrier"]
    return len(made), ", ".join(f"{made.count(op)} {op}" for op in dict.fromkeys(made))


def judge_flat(evidence: Evidence) -> Iterator[Fault]:
    """One call."""
    for rank in evidence.records.ranks:
        number, names = _names_of_calls(evidence, rank)
        if number > 1:
            text = f"right result, but rank {rank} made {number} calls ({names}) where one all_reduce is asked"
            yield Fault("too many calls", f"{text}: each pays the latency once more")


def budget_broadcast(evidence: Evidence) -> list[str]:
    """Say how many calls a rank made."""
    number, names = _names_of_calls(evidence, 0)
    return [f"{number} call{'' if number == 1 else 's'} per rank: {names}"]


budget_average = budget_repair = budget_uneven = budget_broadcast


def budget_flat(evidence: Evidence) -> list[str]:
    """Say what the one all-reduce sent."""
    n, made = evidence.world_size, evidence.results[0][""]["result"]
    gradients = [one for name, one in made.items() if name.startswith("gradient") and isinstance(one, Tensor)]
    wanted = 2 * (n - 1) / n * 8 * sum(one.numel() for one in gradients)
    return ["1 all-reduce", sent_line(evidence, wanted, "a ring")]


def told(error: RankError) -> str:
    """Return what a failure says before the stacks, without times."""
    return re.sub(r" for \d+\.\d s", "", str(error).partition("\n---")[0]).strip()


def failure_broadcast(error: RankError, world_size: int) -> Fault | None:
    """Name the two ways in which a broadcast hangs or breaks."""
    text = str(error)
    if "do not make the same call" in text or len(set(re.findall(r"root (\d+)", text))) > 1:
        return Fault("different calls", f"every rank must name the same root, src=0. {told(error)}")
    if "deadlock" in text:
        return Fault("deadlock", f"all ranks must call broadcast, the receivers too. {told(error)}")
    return None


def failure_average(error: RankError, world_size: int) -> Fault | None:
    """Name a hang, a mismatch or an error that comes from a gradient that is None."""
    text = str(error)
    cause = "rank 0 did not use the branch, so its gradients are None there"
    if "NoneType" in text:
        return Fault("missing gradient", f"{cause}: count a missing gradient as zeros.\n{told(error)}")
    if world_size == 1 or not ("do not make the same call" in text or "rank 0 has returned without it" in text):
        return None
    lines = [line.strip() for line in told(error).splitlines() if line.strip().startswith("rank ") and "#" in line]
    cause += "; a rank that leaves a parameter out makes other calls than the rest: count a missing gradient as zeros"
    return Fault("missing gradient", "\n".join([cause, *lines[:4]]))


failure_flat = failure_average

_LIST = "[*module.parameters(), *module.buffers()]"
WRONG_BROADCAST = (
    Mutant(
        "buffers forgotten", "buffers", "buffers stay different; forward reads them too, so broadcast them", 2, 11
    ).without(", *module.buffers()"),
    Mutant(
        "frozen forgotten", "frozen", "frozen parameters stay different; forward reads them, so broadcast them", 2, 11
    ).edit("*module.parameters()", "*(p for p in module.parameters() if p.requires_grad)"),
    Mutant(
        "fills copies", "copies", "nothing of rank 0 comes into the module's own tensors; broadcast these", 2, 11
    ).edit(".detach()", ".detach().clone()"),
    Mutant(
        "averages instead", "averages", "it is the mean over ranks, which is no rank's start; send rank 0's own", 2, 10
    ).edit(
        "dist.broadcast(tensor.detach(), src=0)",
        """
        dist.all_reduce(tensor.detach())
        tensor.detach().copy_((tensor.detach() / dist.get_world_size()).to(tensor.dtype))
        """,
    ),
    Mutant("only rank 0 calls", "deadlock", "the receivers too", 2, 5).edit(
        "dist.broadcast(", "dist.get_rank() == 0 and dist.broadcast("
    ),
    Mutant("each its own root", "different calls", "the same root, src=0", 2, 7, ends=True).edit(
        "src=0", "src=dist.get_rank()"
    ),
    Mutant(
        "saved buffers only", "unsaved", "buffers with persistent=False are left out; send module.buffers()", 2
    ).edit(_LIST, "module.state_dict().values()"),
    Mutant(
        "by the last rank", "other root", "the last rank's tensors are sent; broadcast those of rank 0: src=0", 2
    ).edit("src=0", "src=dist.get_world_size() - 1"),
    Mutant(
        "new parameters",
        "new objects",
        "the module gets new parameters, and an optimizer that was built before keeps the old ones; write into the "
        "tensors that are there",
        1,
    ).edit(
        "for tensor",
        """
        for layer in module.modules():
            for name, old in layer._parameters.items():
                layer._parameters[name] = nn.Parameter(old.detach(), old.requires_grad)
        for tensor
        """,
    ),
)

_DIVIDE, _SEND = "parameter.grad /= dist.get_world_size()", "dist.all_reduce(parameter.grad)"
WRONG_AVERAGE = (
    Mutant("sum", "sum not mean", "it is the sum over ranks, not the mean", 4, 9).without(_DIVIDE),
    Mutant("skips None", "missing gradient", "count a missing gradient as zeros", 2, 15, ends=True)
    .edit("if parameter.requires_grad:", "if parameter.requires_grad and parameter.grad is not None:")
    .without("if parameter.grad is None:\n    parameter.grad = torch.zeros_like(parameter)"),
    Mutant(
        "weights", "averages parameters", "the parameters are averaged; what is averaged must be parameter.grad", 2, 10
    )
    .edit("parameter.grad /=", "parameter.data /=")
    .edit("all_reduce(parameter.grad)", "all_reduce(parameter.data)"),
    Mutant("divides twice", "divided twice", "once too often", 3, 63).edit(_DIVIDE, f"{_DIVIDE} ** 2"),
    Mutant(
        "reduce to rank 0", "one rank", "rank 0 alone gets the mean, and replicas drift apart; all_reduce it", 2, 4
    ).edit(_SEND, "dist.reduce(parameter.grad, dst=0)"),
    Mutant(
        "frozen too", "frozen", "frozen parameters get a gradient, and would move; skip requires_grad=False", 1, 17
    ).edit("parameter.requires_grad", "True"),
    Mutant("averages copies", "lost", "the mean does not come into parameter.grad; write it there", 2, 63)
    .edit("parameter.grad /=", "mean = parameter.grad /")
    .edit(_SEND, "dist.all_reduce(mean)"),
    Mutant("maximum", "not a sum", "it takes the largest of the ranks' numbers (ReduceOp.MAX), not their sum", 2).edit(
        _SEND, "dist.all_reduce(parameter.grad, dist.ReduceOp.MAX)"
    ),
    Mutant(
        "ones for None", "ones for None", "a missing gradient counts as ones; fill in zeros (torch.zeros_like)", 2
    ).edit("zeros_like", "ones_like"),
    Mutant(
        "mean of those who have",
        "mean of those who have",
        "a gradient is divided by the number of ranks that have one; one that is missing counts as zeros, so divide by "
        "world_size",
        2,
    )
    .edit(
        "if parameter.grad is None:",
        "have = torch.tensor(float(parameter.grad is not None))\nif parameter.grad is None:",
    )
    .edit(_DIVIDE, "dist.all_reduce(have)\nparameter.grad /= have"),
    Mutant("None stays", "None stays", "a gradient that is missing here stays None; it gets the others' mean, too", 2)
    .edit("parameter.grad is None:", "(bare := parameter.grad is None):")
    .edit(_SEND, f"{_SEND}\nif bare:\n    parameter.grad = None"),
    Mutant("magnitudes", "magnitudes", "it counts magnitudes; a gradient keeps its sign", 1).edit(
        "parameter.grad /=", "parameter.grad.abs_()\nparameter.grad /="
    ),
)
WRONG_FLAT = (
    Mutant("weights", "parameters", "the parameters are averaged; what is averaged must be parameter.grad", 2, 10)
    .edit("parameter.grad.flatten()", "parameter.data.flatten()")
    .edit("parameter.grad.copy_(", "parameter.data.copy_("),
    Mutant(
        "frozen too", "frozen", "frozen parameters get a gradient, and would move; skip requires_grad=False", 1
    ).without(" if parameter.requires_grad"),
    Mutant("one a parameter", "too many calls", "where one all_reduce is asked", 2, 1).edit(
        "dist.all_reduce(flat)",
        "for piece in flat.split([one.numel() for one in parameters]):\n    dist.all_reduce(piece)",
    ),
    Mutant("sum", "sum not mean", "it is the sum over ranks, not the mean", 3, 9).without(
        "flat /= dist.get_world_size()"
    ),
    Mutant("another order", "mixed", "the pieces come to other parameters; split in the order of torch.cat", 1, 8).edit(
        "parameter.grad.flatten() for parameter in parameters",
        "parameter.grad.flatten() for parameter in parameters[::-1]",
    ),
    Mutant(
        "never unpacked", "never unpacked", "the gradients are what they were; copy the pieces back into them", 2, 63
    ).edit("parameter.grad.copy_(piece.view_as(parameter))", "pass"),
    Mutant("skips None", "missing gradient", "count a missing gradient as zeros", 2, 15, ends=True).edit(
        "if parameter.requires_grad]", "if parameter.grad is not None]"
    ),
    Mutant(
        "tied twice", "tied twice", "a weight that two layers share travels twice; parameters() has it once", 2, 17
    ).edit(
        "parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]",
        """
        layers = [layer for layer in module.modules() if layer is not module]
        parameters = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad]
        """,
    ),
    Mutant(
        "gathers all", "gathers", "every rank gets all ranks' gradients, to add them up; an all-reduce sends less", 4, 1
    )
    .without("flat /= dist.get_world_size()")
    .edit(
        "dist.all_reduce(flat)",
        """
        everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, flat)
        flat = torch.stack(everyone).mean(0)
        """,
    ),
    Mutant("None stays", "None stays", "a gradient that is missing here stays None; it gets the others' mean, too", 2)
    .edit(
        "for parameter in parameters:\n    if",
        "bare = {id(p) for p in parameters if p.grad is None}\nfor parameter in parameters:\n    if",
    )
    .edit(
        "parameter.grad.copy_(piece.view_as(parameter))",
        "parameter.grad = None if id(parameter) in bare else piece.view_as(parameter).clone()",
    ),
    Mutant("kept by id", "values", "of call 1 with other tensors", 2, "one call", preamble="_kept = {}").edit(
        "for parameter in parameters:",
        "parameters = _kept.setdefault(id(module), parameters)\nfor parameter in parameters:",
    ),
)
