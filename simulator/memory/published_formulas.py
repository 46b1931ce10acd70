"""Published formulas of memory: model states of ZeRO, activations of a transformer layer."""

from __future__ import annotations


def adam_state_bytes(num_parameters: float, *, zero_stage: int = 0, num_ranks: int = 1) -> float:
    """Return bytes per rank of mixed-precision Adam: 2 per parameter, 2 for its gradient, 12 for the optimizer.

    Stage 1 shards the optimizer over the ranks, stage 2 gradients too, stage 3 parameters too.

    Source: Rajbhandari et al. 2020 (1910.02054), section 3 and Table 1.

    Raises:
        ValueError: the stage is not 0 to 3, or there is less than one rank.
    """
    if zero_stage not in (0, 1, 2, 3) or num_ranks < 1:
        raise ValueError(
            f"ZeRO stage {zero_stage} over {num_ranks} ranks; choose a stage of 0 to 3 and at least one rank"
        )
    shards = [num_ranks if zero_stage >= needed else 1 for needed in (3, 2, 1)]  # parameters, gradients, optimizer
    return num_parameters * sum(size / parts for size, parts in zip((2, 2, 12), shards, strict=True))


def activation_bytes_per_layer(
    hidden_size: int,
    num_heads: int,
    sequence_length: int,
    microbatch_size: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return bytes that one transformer layer keeps for backward, in 16-bit precision.

    Args:
        hidden_size: h.
        num_heads: a.
        sequence_length: s.
        microbatch_size: B.
        tensor: degree t of tensor parallelism.
        sequence_parallel: whether the parts outside tensor parallelism are split along the sequence too.
        recompute: "none"; "selective" (the attention scores, as flash attention does); "full" (only the layer's input).

    Source: Korthikanti et al. 2022 (2205.05198), equations 1 to 4 and Table 2, s B h (34 + 5 a s / h) on one rank.

    Raises:
        ValueError: recompute is not one of the three, or a size is less than 1.
    """
    sizes = (hidden_size, num_heads, sequence_length, microbatch_size, tensor)
    if min(sizes) < 1:
        raise ValueError(f"sizes are {sizes}; pass hidden size, heads, sequence, micro-batch and degree of at least 1")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is {recompute!r}; choose none, selective or full")
    unit = sequence_length * microbatch_size * hidden_size
    if recompute == "full":
        return 2.0 * unit / (tensor if sequence_parallel else 1)
    scores = 5 * num_heads * sequence_length / hidden_size if recompute == "none" else 0.0
    if sequence_parallel:
        return unit * (34 + scores) / tensor
    return unit * (10 + (24 + scores) / tensor)
