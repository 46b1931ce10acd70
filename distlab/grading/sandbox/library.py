"""The library's own versions of what exercises ask for: an answer that calls one is told to do the work itself.

`TWINS` lists them by exercise. What is on an exercise's import lines stays allowed, and so do the library's other
functions. A call counts where the answer's own code leads to it, whatever name it goes by.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from distlab.grading.exercise import Exercise, Refused
from distlab.grading.sandbox.wires import calls_library

if TYPE_CHECKING:
    from distlab.grading.sandbox.loaded import Found


def _parts(package: str, names: str) -> tuple[str, ...]:
    return tuple(package + name for name in names.split(" "))


_GRADIENTS = (
    *_parts("distlab.data_parallel.", "bucketed horovod"),
    *_parts("distlab.data_parallel.steps:", "Bucketed Overlapped average_per_parameter average_flat train_step"),
)
_FLAT = (*_GRADIENTS, "distlab.data_parallel.steps:FlatBucket", "distlab.flat", "distlab.gradients.flat_gradients")
_RATES = ("distlab.large_batch.scaling",)
_TRUST = _parts("distlab.large_batch.", "trust lars lamb")
_NORMS = ("distlab.clip", "distlab.hybrid.norm", "distlab.tensor_parallel.norm")
_SHARDS = _parts("distlab.sharding.", "any_model by_element cut_layers fsdp part plain state zero")
_LAYERS = (
    "distlab.modules.split",
    *_parts(
        "distlab.tensor_parallel.", "async_calls attention by_plan dropout linear norm overlap parallelize vocabulary"
    ),
)
_SEQUENCE = _parts(
    "distlab.tensor_parallel.functions:", "gather_sequence reduce_scatter_sequence split_sequence join_sequence"
)
_ORDERS = _parts(
    "distlab.plan.schedules.", "basic building_blocks families interleaved rows search turns v_shaped zero_bubble"
)
_MESH = ("distlab.plan.mesh", "distlab.plan.axes", "distlab.hybrid", "distlab.comm.groups:mesh_groups")
_EXPERTS = _parts("distlab.expert_parallel.", "assign convert gradients layer plain router")
_SAVED = (
    *_parts("distlab.checkpoint.", "asynchronous find formats manifest parts per_rank resume snapshot"),
    *_parts("distlab.checkpoint.files:", "new_file write_tensors write_bytes begin publish saved"),
)
_MEMORY = ("simulator.memory", "simulator.models")
_CALLS = ("distlab.comm.record.alike", "distlab.comm.record.matching", "distlab.comm.where")
_MEETING = ("distlab.comm.rendezvous", "distlab.elastic.agents")

_CHECK = (
    "distlab.grading.diagnosis.values",
    "distlab.grading.variation",
    "distlab.grading.causes",
    "distlab.grading.mutant",
)

TWINS: dict[str, tuple[str, ...]] = {
    "01.fit": ("simulator.hardware.fit", "distlab.measure.machine.fit"),
    "01.gather": ("distlab.collectives.direct",),
    "02.ring_reduce_scatter": ("distlab.collectives",),
    "02.ring_all_gather": ("distlab.collectives",),
    "02.tree_broadcast": ("distlab.collectives",),
    "02.halving_doubling": ("distlab.collectives",),
    "02.repair": ("distlab.collectives",),
    "02.times": ("simulator.hardware.cost",),
    "02.hierarchical": ("distlab.collectives.hierarchical", "distlab.nodes"),
    "03.broadcast": (
        *("distlab.data_parallel.steps:broadcast_parameters", "distlab.data_parallel.buffers", "distlab.replicate"),
        "distlab.sharding.any_model.first_values",
    ),
    "03.average": _FLAT,
    "03.flat": _FLAT,
    "03.repair": _FLAT,
    "03.overlap": _GRADIENTS,
    "03.buckets": ("distlab.plan.buckets",),
    "03.accumulate": _GRADIENTS,
    "03.sampler": ("distlab.data_parallel.sampler", "distlab.data:SampleOrder"),
    "03.uneven": ("distlab.data_parallel.steps:loss_weight", "distlab.data_parallel.steps:micro_weights"),
    "04.rate": _RATES,
    "04.accumulate": (*_GRADIENTS, "distlab.data_parallel.steps:micro_weights"),
    "04.lars": _TRUST,
    "04.lamb": _TRUST,
    "04.repair": _RATES,
    **dict.fromkeys(
        ("05.top_k", "05.random_k", "05.pack", "05.quantize", "05.repair", "05.feedback", "05.powersgd"),
        ("distlab.compression",),
    ),
    "06.states": _MEMORY,
    "06.activations": _MEMORY,
    "06.recompute": ("distlab.recompute",),
    "06.repair": _GRADIENTS,
    "06.master": ("distlab.precision.master_weights",),
    "06.scaler": ("distlab.precision.loss_scaler",),
    "07.pieces": (*_SHARDS, "distlab.plan.sharding:FlatLayout"),
    **dict.fromkeys(("07.step", "07.forward", "07.ahead", "07.backward", "07.repair"), _SHARDS),
    "07.clip": (*_SHARDS, *_NORMS),
    "08.cut": (*_LAYERS, "distlab.sharding.state"),
    "08.f_and_g": ("distlab.tensor_parallel",),
    **dict.fromkeys(("08.mlp", "08.heads", "08.cross_entropy", "08.dropout", "08.repair"), _LAYERS),
    "08.sequence": (*_LAYERS, *_SEQUENCE),
    "08.clip": (*_LAYERS, *_NORMS, "distlab.tensor_parallel.functions:sum_gradients"),
    **dict.fromkeys(("09.gpipe", "09.one_f_one_b", "09.zero_bubble"), _ORDERS),
    "09.bubble": (*_ORDERS, "simulator.step", "simulator.pipeline"),
    **dict.fromkeys(("09.run_rank", "09.split", "09.repair"), ("distlab.pipeline",)),
    **dict.fromkeys(("10.coordinates", "10.groups", "10.my_batch"), _MESH),
    **dict.fromkeys(("10.gradient_axes", "10.find_the_bug"), ("distlab.hybrid",)),
    "10.global_norm": (*_NORMS, "distlab.hybrid"),
    "10.place": ("simulator.sweeps", "simulator.hardware.rank_layout"),
    **dict.fromkeys(("11.merge", "11.zigzag", "11.ring"), ("distlab.context_parallel",)),
    **dict.fromkeys(("11.route", "11.balance", "11.ask", "11.repair"), _EXPERTS),
    **dict.fromkeys(("12.save", "12.resume", "12.shards", "12.newest"), _SAVED),
    "12.load": (*_SAVED, *_SHARDS),
    "12.samples": ("distlab.elastic", *_RATES),
    "12.share": ("simulator.runs",),
    "13.exposed": ("distlab.profile", "simulator.step"),
    **dict.fromkeys(("13.late", "13.dearest"), ("distlab.profile",)),
    "13.clocks": ("distlab.profile", "distlab.comm.clocks"),
    "13.divergence": _CALLS,
    "13.flip": ("distlab.votes",),
    "13.repair": ("distlab.profile.live", *_GRADIENTS),
    "14.slurm": _MEETING,
    "14.places": ("distlab.comm.groups:node_groups", "distlab.nodes"),
    "14.rendezvous": _MEETING,
    "14.clocks": ("distlab.comm.clocks",),
    "15.fits": _MEMORY,
    "15.step": ("simulator.step", "simulator.hardware.cost", "simulator.stage"),
    "15.choose": ("simulator.advisor",),
    "15.bill": ("simulator.runs",),
    "15.cheapest": ("simulator.runs",),
}
WITHOUT = {  # exercises whose job no function of the library does
    **dict.fromkeys(("01.shift", "01.ping_pong"), "one message: distlab.comm.p2p carries any, as dist.send does"),
    "01.repair": "no function of the library decides by a mean over ranks",
    "14.hosts": "the library never reads a list of hosts: Slurm's own tools have expanded it",
    "14.repair": "the library has no work that one rank of each node does",
    "15.capstone": "the simulator is there to be asked, its advisor too: what it finds must hold",
    "14.preflight": "distlab.comm.agree raises where ranks differ, and lists no hosts",
}


class Twins(NamedTuple):
    """Functions and classes of the library that an answer may not call.

    Attributes:
        exercise: its name.
        places: modules, with all below them, or "module:name".
        allowed: pairs of module and name that the exercise's import lines give.
    """

    exercise: str
    places: tuple[str, ...]
    allowed: tuple[tuple[str, str], ...]

    def has(self, module: str, name: str) -> bool:
        """Return whether the function or class `name` of this module belongs to the library's answers."""
        if not _is_whole(self.places, module) and f"{module}:{name}" not in self.places:
            return False
        return not any(name == given and _is_below(module, where) for where, given in self.allowed)

    def is_one(self, value: Any) -> bool:
        """Return whether a value is one of them."""
        if not isinstance(value, (FunctionType, type)):
            return False
        return self.has(value.__module__, value.__qualname__.partition(".")[0])

    def words(self, value: Any) -> str:
        """Say that an answer calls one of them."""
        name = f"{value.__module__}.{value.__qualname__.removesuffix('.__init__')}"
        if value.__module__.startswith(_CHECK):
            return f"it calls {name}, a function of the check: work the result out from the arguments"
        given = ", ".join(dict.fromkeys(given for _, given in self.allowed))
        may = f"; of the library, {given} may be called" if given else ""
        return f"it calls {name}, the library's own version of what {self.exercise} asks for: write it yourself{may}"


def twins_of(exercise: Exercise) -> Twins:
    """Return what answers to an exercise may not call."""
    allowed = [
        (statement.module or "", alias.name)
        for statement in ast.parse("\n".join(exercise.imports)).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if (statement.module or "").startswith(("distlab.", "simulator"))
    ]
    return Twins(exercise.name, (*TWINS.get(exercise.name, ()), *_CHECK), tuple(allowed))


def _holds_some(places: tuple[str, ...], module: str) -> bool:
    return _is_whole(places, module) or any(place.startswith(f"{module}:") for place in places)


def _is_whole(places: tuple[str, ...], module: str) -> bool:
    return f"{module}.".startswith(_whole_modules(places))


@functools.cache
def _whole_modules(places: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{place}." for place in places if ":" not in place)


def _is_below(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def refuse_twins(twins: Twins, is_up: Callable[[], bool]) -> None:
    """Refuse, from now on in this process, that the answer's own lines lead to one of these functions."""
    from distlab.grading.sandbox.loaded import FOUND, library, library_since, look

    wrapped: dict[int, Callable[..., Any]] = {}
    _wrap(FOUND, twins, is_up, wrapped)
    _wrap(look(library_since()), twins, is_up, wrapped)
    sys.meta_path.insert(0, _Loading(twins, lambda: _wrap(look(library(list(sys.modules))), twins, is_up, wrapped)))


class _Loading:
    """A finder of modules that hold twins: once one is loaded, its functions are wrapped."""

    def __init__(self, twins: Twins, wrap: Callable[[], None]) -> None:
        self._modules = tuple({place.partition(":")[0] for place in twins.places})
        self._wrap = wrap

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where such a module is, or None for any other."""
        if not any(_is_below(name, module) for module in self._modules):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_wrap(module: ModuleType) -> None:
                execute(module)
                self._wrap()

            spec.loader.exec_module = then_wrap  # type: ignore[method-assign]
        return spec


def _wrap(found: Found, twins: Twins, is_up: Callable[[], bool], wrapped: dict[int, Callable[..., Any]]) -> None:
    for module, name, value in (one for owner in found if _holds_some(twins.places, owner) for one in found[owner]):
        if not twins.is_one(value):
            continue
        if isinstance(value, type):
            _wrap_class(value, twins, is_up, wrapped)
        elif id(value) in wrapped:
            setattr(module, name, wrapped[id(value)])
        elif not is_twin(value):
            wrapped[id(value)] = _refusing(value, value, twins, is_up)
            setattr(module, name, wrapped[id(value)])


def _wrap_class(kind: type, twins: Twins, is_up: Callable[[], bool], wrapped: dict[int, Callable[..., Any]]) -> None:
    begins = vars(kind).get("__init__")
    if isinstance(begins, FunctionType) and not is_twin(begins):
        wrapped[id(kind)] = _refusing(begins, kind, twins, is_up)
        kind.__init__ = wrapped[id(kind)]  # type: ignore[misc]


def _refusing(real: Callable[..., Any], what: Any, twins: Twins, is_up: Callable[[], bool]) -> Callable[..., Any]:
    find = sys._getframe

    @functools.wraps(real)
    def call(*args: Any, **named: Any) -> Any:
        if is_up() and calls_library(find(1)):
            raise Refused("library", twins.words(what))
        return real(*args, **named)

    call._is_twin = True  # type: ignore[attr-defined]
    return call


def is_twin(value: Any) -> bool:
    """Return whether a function was wrapped by `refuse_twins`."""
    return hasattr(value, "_is_twin")
