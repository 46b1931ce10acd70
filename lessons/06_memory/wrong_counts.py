"""Wrong versions of counting: model states and activations."""

from __future__ import annotations

from distlab.plan import Plan, Precision
from distlab.plan.sharding import DTYPE_BYTES

FIRST_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1, "master weights": 1}


def _states(num_parameters: int, plan: Plan, each: dict[str, int], first: dict[str, int], shard: int) -> dict[str, int]:
    stage = plan.sharding.stage
    return {kind: size * (shard if stage >= first[kind] else num_parameters) for kind, size in each.items()}


def _each(plan: Plan, numbers: int) -> dict[str, int]:
    precision = plan.precision or Precision()
    return {
        "parameters": DTYPE_BYTES[precision.compute],
        "gradients": DTYPE_BYTES[precision.gradients],
        "optimizer": 4 * numbers,
        "master weights": 4 if precision.has_master_weights else 0,
    }


def _shard(num_parameters: int, plan: Plan) -> int:
    return -(-num_parameters // plan.sharding.num_shards(plan.data))


def states_of_inference(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Count what inference needs."""
    return {"parameters": _each(plan, numbers)["parameters"] * num_parameters}


def states_with_two_copies(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Add a float32 copy to float32 parameters."""
    each = _each(plan, numbers) | {"master weights": 4}
    return _states(num_parameters, plan, each, FIRST_STAGE, _shard(num_parameters, plan))


def states_without_master(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Believe that 16-bit training keeps 16-bit numbers alone."""
    each = _each(plan, numbers) | {"master weights": 0}
    return _states(num_parameters, plan, each, FIRST_STAGE, _shard(num_parameters, plan))


def states_one_type(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Count gradients in the type of the parameters."""
    each = _each(plan, numbers)
    return _states(
        num_parameters, plan, each | {"gradients": each["parameters"]}, FIRST_STAGE, _shard(num_parameters, plan)
    )


def states_half_moments(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Count Adam's moments in the type of the parameters."""
    each = _each(plan, numbers)
    each["optimizer"] = each["parameters"] * numbers
    return _states(num_parameters, plan, each, FIRST_STAGE, _shard(num_parameters, plan))


def states_all_sharded(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Split everything from stage 1 on: the guide's 8x and 16x."""
    first = dict.fromkeys(FIRST_STAGE, 1)
    return _states(num_parameters, plan, _each(plan, numbers), first, _shard(num_parameters, plan))


def states_master_whole(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Leave the float32 copy whole, as parameters are."""
    first = FIRST_STAGE | {"master weights": 3}
    return _states(num_parameters, plan, _each(plan, numbers), first, _shard(num_parameters, plan))


def states_rounded_down(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Forget the elements that do not divide."""
    shard = num_parameters // plan.sharding.num_shards(plan.data)
    return _states(num_parameters, plan, _each(plan, numbers), FIRST_STAGE, shard)


def states_over_all(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Shard over all ranks, replicas or not."""
    return _states(num_parameters, plan, _each(plan, numbers), FIRST_STAGE, -(-num_parameters // plan.data))


def _activations(
    hidden: int, sequence: int, microbatch: int, whole: float, split: float, *, tensor: int, parallel: bool
) -> float:
    return sequence * microbatch * hidden * (whole / (tensor if parallel else 1) + split / tensor)


def activations_34(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Charge 34 s B h a layer under full recompute, as a public calculator does."""
    scores = 5 * heads * sequence / hidden if recompute == "none" else 0
    return _activations(hidden, sequence, microbatch, 10, 24 + scores, tensor=tensor, parallel=sequence_parallel)


def activations_always_parallel(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Assume sequence parallelism, as Megatron-LM's estimator does by default."""
    scores = 5 * heads * sequence / hidden if recompute == "none" else 0
    whole, split = (2, 0) if recompute == "full" else (10, 24 + scores)
    return _activations(hidden, sequence, microbatch, whole, split, tensor=tensor, parallel=True)


def activations_without_scores(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Forget what grows with the square of the sequence."""
    whole, split = (2, 0) if recompute == "full" else (10, 24)
    return _activations(hidden, sequence, microbatch, whole, split, tensor=tensor, parallel=sequence_parallel)


def activations_whole_scores(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Give each rank the scores of all heads."""
    scores = 5 * heads * sequence / hidden * tensor if recompute == "none" else 0
    whole, split = (2, 0) if recompute == "full" else (10, 24 + scores)
    return _activations(hidden, sequence, microbatch, whole, split, tensor=tensor, parallel=sequence_parallel)


def activations_in_elements(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Count elements and call them bytes."""
    scores = 5 * heads * sequence / hidden if recompute == "none" else 0
    whole, split = (2, 0) if recompute == "full" else (10, 24 + scores)
    return _activations(hidden, sequence, microbatch, whole / 2, split / 2, tensor=tensor, parallel=sequence_parallel)


def activations_selective_keeps(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Keep the scores under selective recompute."""
    scores = 5 * heads * sequence / hidden
    whole, split = (2, 0) if recompute == "full" else (10, 24 + scores)
    return _activations(hidden, sequence, microbatch, whole, split, tensor=tensor, parallel=sequence_parallel)


def activations_all_split(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Let tensor parallelism split a recomputed layer's input."""
    scores = 5 * heads * sequence / hidden if recompute == "none" else 0
    whole, split = (0, 2) if recompute == "full" else (10, 24 + scores)
    return _activations(hidden, sequence, microbatch, whole, split, tensor=tensor, parallel=sequence_parallel)
