"""Compare the cut model with the whole one: both run once on the same input and must compute the same.

No plan shows how a forward uses what a layer makes. Three projections may lie one after the other, or side by side for
each head; a softmax may need all features. Then each rank computes something, and the shapes fit. So the model is
copied before the cut, without its weights. At the first forward the copy runs: each of its cut layers borrows the parts
of all ranks while it computes, so that no rank holds the whole model. What each row layer reads must be the rank's part
of what the whole one's reads. The first that is not says where the plan is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.agree import group_device
from distlab.comm.p2p import group_rank
from distlab.modules.split import Split
from distlab.modules.structures import find
from distlab.modules.trial import Copier, clone, without_numbers
from distlab.rng import keep_random_state
from distlab.tensor_parallel.by_plan.plan import HINTS, columns_of

OUTPUT = "the output"


class Made(NamedTuple):
    """What one forward made: the name of each row layer with its input, and then the output's tensors; or an error."""

    values: list[tuple[str, Tensor]]
    error: Exception | None
    inside: str  # the innermost module that ran when the error came


class WholeModel:
    """A model as it was before the cut, without weights of its own.

    Args:
        model: not cut yet.
        styles: of its modules that will be cut.
        group: the ranks.
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, str], group: ProcessGroup | None) -> None:
        self._copy = Copier(lambda one: without_numbers(one) if isinstance(one, nn.Parameter) else clone(one)).copy(
            model
        )
        self._styles, self._group = dict(styles), group
        self._where = f"rank {group_rank(group)}: parallelize_module:"

    def compare_with(self, model: nn.Module, example: Sequence[Any] | None) -> None:
        """Compare for an example; without one, before the first forward that has something to compare.

        Raises:
            ValueError: see `compare`; or the example gives no numbers.
        """
        if example is not None:
            if not self.compare(model, example, {}):
                raise ValueError(f"{self._where} the example gives no numbers to compare; pass inputs of a forward")
            return
        if dist.get_world_size(self._group) == 1:
            return

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not any(tensor.is_meta for tensor in find((args, kwargs))[0]) and self.compare(module, args, kwargs):
                handle.remove()

        handle = model.register_forward_pre_hook(before, with_kwargs=True)

    def compare(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Run copies of the whole and of the cut model in eval mode; return whether there was something to compare.

        Cost: (t-1)/t of the bytes of each cut parameter that the whole model reads, a forward of the cut model, and an
            all-gather of 8 bytes.

        Raises:
            ValueError: on every rank: they compute something else, or the cut model alone raises.
        """
        whole_parameters = self._borrow(model)
        rows = [name for name, style in self._styles.items() if style == "row"]
        expected = _run(self._copy, whole_parameters, rows, (args, kwargs))
        if expected.error is not None:
            raise expected.error  # the input is wrong: so one process says it
        got = _run(model, list(model.parameters()), rows, (args, kwargs))
        if got.error is not None:
            self._say_error(model, got.error, got.inside)
        self._refuse_differences(got.values, expected.values, _precision(model))
        return any(tensor.is_floating_point() for _, tensor in expected.values)

    def _borrow(self, model: nn.Module) -> list[Tensor]:
        """Let the copy use the model's parameters and copies of its buffers; return the parameters."""
        now = dict(nn.Module.named_modules(model, remove_duplicate=False))  # not a method of the model's own
        for name, module in nn.Module.named_modules(self._copy, remove_duplicate=False):
            one = now.get(name)
            names = set(module._parameters) | {key for key in vars(type(module)) if key in ("weight", "bias")}
            if one is None or set(one._parameters) != names or any(_is_elsewhere(p) for p in one._parameters.values()):
                raise ValueError(
                    f"{self._where} the first forward compares the cut model with the whole one, and the parameters of "
                    f"{name or 'the model'} are not there any more: the model was wrapped or changed after the cut. "
                    "Pass example=(inputs of one forward) to parallelize_module, which compares at once; or call the "
                    "cut model once before you wrap it (FullyShard, LoRA)"
                )
            splits = getattr(one, "splits", {})
            module._buffers.update({key: None if b is None else b.clone() for key, b in one._buffers.items()})
            module._parameters.update({key: p for key, p in one._parameters.items() if key not in splits})
            if splits:
                _gather_when_read(module, one, splits, self._group)
        return list(self._copy.parameters())

    def _say_error(self, model: nn.Module, error: Exception, inside: str) -> None:
        if isinstance(error, ValueError) and str(error).startswith("rank "):
            raise error  # a guard's: it has said what to do
        near = [name for name in self._styles if name.startswith(inside + ".")] or [*self._styles]
        raise ValueError(
            f"{self._where} {inside or 'the model'} ({type(model.get_submodule(inside)).__name__}) fails in the cut "
            f"model and not in the whole one: {type(error).__name__}: {(str(error) or 'no words').splitlines()[0]}. "
            "Its forward takes a number of heads or features from a constant or a config. If it is an attribute of the "
            f"module, name that in head_counts=; else leave out of the plan what is cut here: {', '.join(near[:4])}, "
            f"with the row behind it.{self._of_sequence}"
        ) from error

    def _refuse_differences(
        self, got: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]], precision: float
    ) -> None:
        """Refuse, on every rank, the first value that differs on some rank.

        Raises:
            ValueError: naming the layers and the style that may be right.
        """
        num_ranks, rank = dist.get_world_size(self._group), group_rank(self._group)
        first, by = len(expected) if len(got) >= len(expected) else len(got), 0.0
        begin = next((at for at, (name, _) in enumerate(expected) if name == OUTPUT), -1)
        for at, ((name, other), (also, one)) in enumerate(zip(expected, got, strict=False)):
            if name != OUTPUT and other.shape[-1] % num_ranks == 0:
                other = other.chunk(num_ranks, -1)[rank]
            elif one.shape != other.shape and at > begin >= 0:
                continue  # behind the first tensor: a cache of keys has other heads on each rank
            by = _difference(one, other) if name == also and one.shape == other.shape else float("nan")
            if not by <= min(100 * max(precision, _precision_of(other)) ** 0.75, 0.05):
                first = at
                break
        mine = torch.tensor([first], device=group_device(self._group))
        everyone = [torch.empty_like(mine) for _ in range(num_ranks)]
        dist.all_gather(everyone, mine, group=self._group)
        at = min(int(one) for one in everyone)
        if at < len(expected):
            raise ValueError(
                f"{self._where} the cut model returns other numbers than the whole one (here by {by:.1e} of the "
                f"largest); {self._why(expected[at][0])}"
            )

    def _why(self, name: str) -> str:
        if name == OUTPUT:
            return (
                "what its row layers read is right, and the output is not. Does its forward use a constant number of "
                "heads (see head_counts=), or a layer's weight without the layer? Leave those layers out of the plan."
                f"{self._of_sequence}"
            )
        columns = columns_of(name, self._styles)
        hints = " ".join(dict.fromkeys(HINTS[self._styles[column]] for column in columns)) + self._of_sequence
        return f"first in what {name} (row) reads, which {', '.join(columns[:4])} begin. {hints}"

    @property
    def _of_sequence(self) -> str:
        return f" {HINTS['sequence']}" if "sequence" in self._styles.values() else ""


def _gather_when_read(
    module: nn.Module, cut: nn.Module, splits: Mapping[str, Split], group: ProcessGroup | None
) -> None:
    """Let a layer of the whole model read its parameters from the ranks each time that it needs them."""

    def reader(name: str) -> property:
        def read(_: nn.Module) -> Tensor:
            part = cut._parameters[name]
            assert part is not None
            mine = part.detach().contiguous()
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            return splits[name].join(parts)

        return property(read)

    names = [name for name in splits if cut._parameters[name] is not None]
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: reader(name) for name in names})
    for name in names:
        module._parameters.pop(name, None)


def _run(model: nn.Module, shared: Sequence[Tensor], rows: Sequence[str], inputs: Any) -> Made:
    """Call a copy of a model that shares its parameters, on copies of the inputs, in eval mode."""
    own = {id(tensor) for tensor in shared}
    twin = Copier(lambda tensor: tensor if id(tensor) in own else clone(tensor)).copy(model).train(False)
    values: list[tuple[str, Tensor]] = []
    running: list[str] = []

    def enter(name: str) -> Any:
        def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(name)
            if name in rows:
                values.extend([(name, one.detach()) for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])

        return entered

    for name, module in twin.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(enter(name), with_kwargs=True)
            module.register_forward_hook(lambda *_: running.pop() and None)
    args, kwargs = Copier(clone).copy(inputs)
    with keep_random_state():
        try:
            output = twin.forward(*args, **kwargs)
        except Exception as error:  # whatever a foreign forward raises; the caller says it
            return Made(values, error, running[-1] if running else "")
    values += [(OUTPUT, one.detach()) for one in find(output)[0] if one.is_floating_point()]
    return Made(values, None, "")


def _is_elsewhere(parameter: Tensor | None) -> bool:
    """Return whether a parameter is a stand-in for values that are kept in shards."""
    kind: Any = type(parameter)
    return isinstance(parameter, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _difference(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    largest = float(other.abs().max())
    return float((one - other).abs().max()) / (largest or 1.0)


def _precision_of(tensor: Tensor) -> float:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if is_number else 0.0


def _precision(model: nn.Module) -> float:
    """Return the relative rounding of the coarsest type that a forward computes in."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    casts = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    return max([*(torch.finfo(kind).eps for kind in casts), *(_precision_of(p) for p in model.parameters())], default=0)
