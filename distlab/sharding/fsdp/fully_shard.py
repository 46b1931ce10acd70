"""FullyShard: every rank holds a part of everything, and whole parameters only of the units at work (ZeRO-3, FSDP).

A unit is a submodule, such as a block of a transformer. Its life in a step: gather, forward, free; gather again,
backward, free, and reduce its gradient to shards. The gather of the next unit travels while this one computes, and so
does the reduce-scatter of the last. Read `flat_unit` (how), `hooks` (when), `prefetch` (in which order), `wrapping`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.blocks import Choice
from distlab.blocks.modules.moved import NotCopied, mark_moved
from distlab.blocks.replicate import agree_on_build, broadcast_each
from distlab.comm.agree import group_device
from distlab.comm.device import CopyStream
from distlab.plan import Precision
from distlab.sharding.checks import parameters_to_shard
from distlab.sharding.cut_layers import CutLayers, clip_shards_
from distlab.sharding.fsdp.flat_unit import Options, Unit
from distlab.sharding.fsdp.gradient import GradientMemory
from distlab.sharding.fsdp.hooks import Running, WatchedModule, runs_in_backward
from distlab.sharding.fsdp.prefetch import Order
from distlab.sharding.fsdp.resharded import STATE, names_of_others, refuse_others, refuse_whole_state
from distlab.sharding.fsdp.step import step_on_pieces
from distlab.sharding.fsdp.wrapping import ROOT, UnitMembers, assign, automatic_units, chosen_units
from distlab.trace import SpanWriter


class FullyShard(NotCopied, nn.Module):
    """Shard a module's parameters, gradients and (through them) optimizer state over a group.

        model = FullyShard(module)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_fn(model(inputs), targets).backward()
        model.synchronize()
        model.clip_gradients_(1.0)
        optimizer.step()

    The optimizer works on flat shards: only one that works by element may step (it is tried); its state is by the names
    of tensors. A parameter without a gradient on all ranks is left alone; on some ranks only: zeros. All ranks run the
    same units in one order.

    Forward may return objects of any class. Where tensors may hide in them (an iterator), the unit stays whole until
    the end of the step. A unit's forward sees its own parameters and those of units around it; other methods that read
    parameters run in `summon()`. Blocks or the whole may be compiled, not with fullgraph=True. Layers may be cut by
    tensor parallelism: `group` is then the data ranks; norms and states are the whole model's.

    Args:
        module: the model; its parameters move into shards. Those of the group's first rank are taken; from the meta
            device none are, and shards are zeros until the caller fills each of `units` (`Unit.fill`) or loads a state.
        group: ranks that hold a shard each; None is all.
        units: submodules to gather one by one: names, classes, patterns ("layers.*") or functions (`find_blocks`); None
            takes all lists' items. What several of these share belongs to the root, and so does what no unit holds.
        reshard_after_forward: free each unit after forward, the root too, and gather it again for backward. False
            keeps all whole until backward: a third less traffic, and the memory of all parameters.
        prefetch: units gathered ahead of the one that computes.
        replicas: hybrid sharding: the ranks with the same shard in other groups; gradients are averaged over both.
        precision: types of parameters in use, of the sums and of the shards.
        offload: keep shards, gradients and so the optimizer's state in the host's memory. With a GPU that memory is
            pinned; copies run next to kernels, the host waits for gradients in `synchronize()`, and the next step
            writes its gradients to the same memory.
        spans: draws "all_gather unit i" and "reduce_scatter unit i".

    Attributes:
        units: all flat shards, in order of use as registered.
        cut: which parameters are parts of whole ones, on tensor ranks.
        step: number of the next `synchronize()`, from 0.

    Cost: with Psi bytes of padded parameters in n shards: 3 Psi (n-1)/n sent per step (two all-gathers, one
        reduce-scatter), 2 Psi (n-1)/n where nothing is freed after forward, 1 Psi (n-1)/n in evaluation. Each forward
        and each backward sends 40 (n-1) bytes more: do all ranks run the same units? With r replicas and a ring:
        2 (r-1)/r of a shard more. Memory: shards, 1 + prefetch whole units, and on shared a unit's gradient.
    Error: as one process up to the order of additions; repeats bit for bit.

    Raises:
        ValueError: on every rank: ranks hold different models or options, units that cannot be.

    Source: Rajbhandari et al. 2020 (ZeRO, stage 3); Zhao et al. 2023 (FSDP). As FSDP2 in what users see; as FSDP1 in
        that a unit is one flat buffer, cut through tensors.
    """

    instead = STATE

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        units: Choice | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        replicas: ProcessGroup | None = None,
        precision: Precision | None = None,
        offload: bool = False,
        spans: SpanWriter | None = None,
    ) -> None:
        super().__init__()
        named = parameters_to_shard(module, plain=True)
        names = automatic_units(module) if units is None else chosen_units(module, units)
        options: dict[str, Any] = {"units": units if units is None else names, "precision": str(precision)}
        options |= {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch, "offload": offload}
        everyone = (group, *([] if replicas is None else [replicas]))
        agree_on_build(named, *everyone, **options)
        _check_options(prefetch, precision)
        found = assign(module, names, automatic=units is None)
        self.module, self.group, self.replicas, self.precision = module, group, replicas, precision
        device = group_device(group) if named[0][1].device.type == "meta" else named[0][1].device
        shared = CopyStream(device), CopyStream(device), GradientMemory(group, device)
        self._options = Options(group, replicas, device, precision, offload, spans, *shared)
        self.step, self.is_summoned, self.cut = 0, False, CutLayers.of(module)
        self.units: list[Unit] = []
        self._watched = [self._wrap(module, name, found, reshard_after_forward) for name in (ROOT, *names)]
        self.order = Order(list(self._watched), prefetch, group)
        self.running: list[Running] = []
        self.finished: list[WatchedModule] = []
        self._last: Unit | None = None
        self.shards = nn.ParameterList([unit.shard for unit in self.units])
        buffers = [buffer for buffer in module.buffers() if buffer.device.type != "meta"]
        for ranks in everyone:
            broadcast_each(buffers, ranks)
        self.register_load_state_dict_pre_hook(refuse_whole_state)  # type: ignore[no-untyped-call]
        step_on_pieces()

    def _wrap(
        self, model: nn.Module, name: str, found: dict[tuple[str, bool], UnitMembers], frees: bool
    ) -> WatchedModule:
        """Move a submodule's parameters into units and put the hooks on."""
        units = []
        for frozen in (False, True):
            members = found.get((name, frozen))
            if members is None:
                continue
            unit = Unit(len(self.units), f"{name} (frozen)".strip() if frozen else name, members, self._options)
            unit.reshard_after_forward = frees
            unit.fill_from_first(members.parameters)
            for own, parameter in zip(members.names, members.parameters, strict=True):  # other code may hold it
                mark_moved(parameter, own, "FullyShard moved it into a shard")
            members.parameters.clear()
            units.append(unit)
            self.units.append(unit)
        return WatchedModule(name, model.get_submodule(name), units, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. An error in it leaves nothing gathered."""
        if runs_in_backward():  # for torch's checkpoint, which ends it by an error of its own
            return self.module(*args, **kwargs)
        if self.running:  # what an error left in a part of the module, called by itself
            self._free_all()
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._free_all()
            raise

    def start_pass(self) -> None:
        """Begin a forward pass: free what an abandoned one left whole."""
        self.running.clear()
        for one in self._watched:
            if one.calls or one.open:  # forward or backward
                one.abandon()
            elif one.stays:
                one.hide()
        refuse_others(names_of_others(self.module, self.units, self.shards))
        self.free_finished(root=True)
        self.order.start_pass()

    def end_pass(self) -> None:
        """End a forward pass: ranks must have run the same units, or their gathers do not belong together."""
        self.order.end_pass()
        for one in self._watched:  # gathered ahead, and not used
            if one not in self.order.begun and not one.stays:
                one.free()

    def take_gradients(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Reduce a unit's gradients; the one before it must be over, so that one flat gradient is on its way."""
        if self._last is not None:
            self._last.finish_scatter()
        unit.take_gradients(gradients)
        self._last = unit

    def synchronize(self) -> None:
        """Finish what is on its way: each shard's gradient is the mean over all ranks."""
        self.order.end_step()
        self._free_all()
        for finish in (Unit.finish_scatter, Unit.finish_replica_sum, Unit.finish_gradient):
            for unit in self.units:
                finish(unit)
        self._last, self.step = None, self.step + 1

    def free_finished(self, *, root: bool = False) -> None:
        """Free units whose gradients exist, once the next begins: backward has passed their inputs. The root stays."""
        for one in self.finished:
            if one.open == 0 and (one.name or root) and not one.stays:
                one.free()
        self.finished = [one for one in self.finished if not one.name and not root]

    def _free_all(self) -> None:
        self.running.clear()
        self.finished.clear()
        for one in self._watched:
            one.abandon()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards, which optimizers update; the parameters of the module are freed."""
        return self.shards.named_parameters(f"{prefix}.shards" if prefix else "shards")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules; when a module around this one asks, yield only this one and its shards."""
        if memo is None:
            yield from super().named_modules(None, prefix, remove_duplicate)
        elif self not in memo:
            memo.add(self)
            yield prefix, self
            yield f"{prefix}.shards" if prefix else "shards", self.shards

    def __deepcopy__(self, known: dict[int, Any]) -> nn.Module:
        """Return a plain copy of the module; only a trial can, which knows what stands for each parameter."""
        return copy.deepcopy(self.module, known)

    def _apply(self, fn: Any, recurse: bool = True) -> FullyShard:
        """Refuse .to(), .double(), ... where they would change anything: what units gather into stays as it is."""
        for name, one in (*self.named_parameters(), *self.named_buffers()):
            changed = fn(one)
            if (changed.dtype, changed.device) != (one.dtype, one.device):
                raise RuntimeError(
                    f"{name} would become {changed.dtype} on {changed.device}, from {one.dtype} on {one.device}; move "
                    "and convert the module before FullyShard is built"
                )
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those that no_sync keeps whole; or, without set_to_none, make them zeros."""
        for unit in self.units:
            unit.forget_gradients(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes in this block keep whole gradients on the rank; the next one reduces their sum.

        It saves a reduce-scatter per pass and costs the memory of whole gradients. Without it passes accumulate too, in
        shards. Put backward inside; where forward runs does not matter.
        """
        before = [unit.sends for unit in self.units]
        for unit in self.units:
            unit.sends = False
        try:
            yield
        finally:
            for unit, sends in zip(self.units, before, strict=True):
                unit.sends = sends

    def clip_gradients_(self, max_norm: float, *, check_finite: bool = True) -> Tensor:
        """Scale all shards' gradients so that their global norm is at most `max_norm`; return the norm they had.

        Cost: one all-reduce of 8 bytes; one more where tensor parallelism has cut layers.

        Raises:
            NotFiniteError: on every rank: a gradient is NaN or infinite.
        """
        return clip_shards_(self.shards.named_parameters(), max_norm, self.group, self.cut, check_finite=check_finite)

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[nn.Module]:
        """Make everything whole in this block, as the module's own parameters; every rank enters it, or none.

        Args:
            write: keep what the block writes to the parameters; the same on every rank.
        """
        self._free_all()
        for gather in (Unit.start_gather, Unit.finish_gather):
            for unit in self.units:
                gather(unit)
        self.is_summoned = True
        whole = {unit: [nn.Parameter(view, requires_grad=False) for view in unit.views()] for unit in self.units}
        for one in self._watched:
            one.show([whole[unit] for unit in one.units])
        try:
            yield self.module
            if write:
                for unit, tensors in whole.items():
                    unit.fill(tensors)
        finally:
            self.is_summoned = False
            self._free_all()

    def close(self) -> None:
        """Remove the hooks and free everything; the shards stay."""
        self._free_all()
        for hook in (hook for one in self._watched for hook in one.hooks):
            hook.remove()


def _check_options(prefetch: int, precision: Precision | None) -> None:
    """Refuse options that no units can be made of.

    Raises:
        ValueError: a prefetch that is not a count, or types that clash.
    """
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch is {prefetch!r}; pass a whole number of at least 0")
    kept = "float32" if precision is None or precision.master else precision.compute
    if precision is not None and precision.gradients != kept:
        raise ValueError(
            f"precision: gradients are kept as {precision.gradients} and shards as {kept}, and an optimizer wants one "
            f"type; pass gradients={kept!r} or a different master"
        )
