"""Buffers: what a layer remembers in addition to its parameters. Averaging gradients does not keep them equal.

Batch normalisation is the usual case. Its layer looks at all samples at once, so data parallelism
changes it in two ways:

1. While it trains, it normalises by mean and variance of the *batch*. A rank sees only its part, so the function that
   is trained is a different one: no averaging of gradients repairs that. `SyncBatchNorm` takes mean and variance of the
   whole batch, over all ranks, and is equal to one process.
2. It keeps running statistics for evaluation. Without synchronisation each rank keeps those of its own samples: the
   parameters stay equal while the buffers drift apart, and the ranks evaluate one model in n ways. `broadcast_buffers`
   gives all ranks those of the first; they are still the statistics of a part of the data.

With `SyncBatchNorm` running statistics are equal on all ranks to the bit, and there is nothing to broadcast.

Symbols: n ranks, C channels, m values per channel in the whole batch (samples x pixels), m_r of them on rank r.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from distlab.blocks.replicate import broadcast_flat
from distlab.comm import agree


def broadcast_buffers(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Give every rank the buffers of the group's first rank; parameters are left alone.

    Call it before each forward pass, as torch's DDP does, or, for less, before each evaluation and checkpoint.

    Cost: one broadcast per dtype, of that dtype's buffer bytes; none when the module has no buffers.
    """
    broadcast_flat(module.buffers(), group)  # a batch norm has two dtypes: running statistics, and a count of batches


class BatchStatistics(NamedTuple):
    """Statistics of a batch, channel by channel.

    Attributes:
        mean: [C]
        squares: [C] sum of the squared distances from the mean; divided by num_values it is the variance.
        num_values: [] values in a channel.
    """

    mean: Tensor
    squares: Tensor
    num_values: Tensor


def local_statistics(x: Tensor) -> BatchStatistics:
    """Return the statistics of this rank's own samples; of none they are zeros.

    Shapes: x [B, C, ...]
    """
    dims = _all_but_channels(x)
    count = x.numel() // x.shape[1]
    mean = x.sum(dims) / max(count, 1)
    squares = (x - _by_channel(mean, x)).square().sum(dims)
    return BatchStatistics(mean, squares, mean.new_tensor(float(count)))


def merge(parts: list[BatchStatistics]) -> BatchStatistics:
    """Return the statistics of all parts together, exactly, from the parts' statistics alone.

    A part's squares were taken around its own mean; moving them to the common mean adds m_r (mean_r - mean)^2. Ranks
    that send sums of x and of x^2 instead send as much, and lose all digits where the mean is large compared
    with the deviation.

    Source: Chan, Golub and LeVeque 1983, Algorithms for Computing the Sample Variance, equations 1.5.
    """
    count = torch.stack([part.num_values for part in parts]).sum()
    mean = torch.stack([part.mean * part.num_values for part in parts]).sum(0) / count
    moved = [part.squares + part.num_values * (part.mean - mean).square() for part in parts]
    return BatchStatistics(mean, torch.stack(moved).sum(0), count)


def group_statistics(x: Tensor, group: ProcessGroup | None = None) -> BatchStatistics:
    """Return the statistics of all ranks' samples, the same bits on every rank.

    Ranks may have different numbers of samples, and some of them none.

    Cost: one all-gather of 2 C + 1 elements per rank.

    Raises:
        ValueError: on every rank: all together have fewer than two values per channel, so there is no variance.
    """
    mean, squares, count = local_statistics(x)
    message = torch.cat([mean, squares, count[None]])
    everyone = message.new_empty(dist.get_world_size(group), len(message))
    dist.all_gather(list(everyone), message, group=group)
    channels = len(mean)
    merged = merge([BatchStatistics(row[:channels], row[channels:-1], row[-1]) for row in everyone])
    # A rank with two values knows that there are enough; only where all have fewer is the sum read.
    if x.numel() // x.shape[1] < 2 and merged.num_values < 2:
        raise ValueError(
            f"rank {dist.get_rank(group)}: SyncBatchNorm got {int(merged.num_values)} values per channel from all "
            "ranks together; a variance needs 2: use a larger batch, or eval() to normalise by the running statistics"
        )
    return merged


class _Normalize(torch.autograd.Function):
    """Subtract the mean, divide by the deviation; both depend on every sample of every rank, so backward sums too."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, scale: Tensor | None, statistics: BatchStatistics, eps: float, group: Any
    ) -> Tensor:
        inverse = torch.rsqrt(statistics.squares / statistics.num_values + eps)
        context.save_for_backward(x, scale, statistics.mean, inverse, statistics.num_values)
        context.group = group
        factor = inverse if scale is None else inverse * scale
        return (x - _by_channel(statistics.mean, x)) * _by_channel(factor, x)

    @staticmethod
    @once_differentiable  # a second derivative would have to communicate again: torch says so instead of being wrong
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, inverse, count = context.saved_tensors
        dims = _all_but_channels(x)
        normal = (x - _by_channel(mean, x)) * _by_channel(inverse, x)
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])  # [2, C]
        scale_gradient = sums[1].clone() if context.needs_input_grad[1] else None  # local: averaged like any parameter
        if not context.needs_input_grad[0]:
            return None, scale_gradient, None, None, None
        dist.all_reduce(sums, group=context.group)
        through_mean, through_deviation = sums / count
        inner = gradient - _by_channel(through_mean, x) - normal * _by_channel(through_deviation, x)
        return inner * _by_channel(inverse if scale is None else inverse * scale, x), scale_gradient, None, None, None


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation by mean and variance of all ranks' samples: equal to one process with the whole batch.

    Names and shapes of parameters and buffers are those of `torch.nn.BatchNorm*d`, so checkpoints fit both ways. Half
    precision is normalised in float32.

    While it trains every rank must call it as often and in the same order, also under `no_sync` and also with no
    samples ([0, C, ...]); in eval it sends nothing. Its calls and those of the gradient buckets alternate in the order
    of backward. Where ranks take different branches that order differs: give the layers a group of their own
    (`dist.new_group()`), or messages of one are taken for the other's.

    Args:
        num_features: channels, C.
        group: ranks that normalise together; None is all.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None gives all batches equal weight.
        affine: learn a scale and a shift per channel.
        track_running_stats: keep running statistics; without them eval normalises by this rank's own batch.

    Cost: training, per forward pass: one all-gather of 2 C + 1 elements per rank; per backward pass: one all-reduce of
        2 C elements, none where the input wants no gradient. Before the first, agreement (40 bytes).
    Error: as one process up to the order of additions; running statistics are the same bits on every rank.

    Raises:
        ValueError: the input's shape does not fit, ranks were built differently, or there is no variance.

    Source: Ioffe and Szegedy 2015, algorithm 1. The running variance is divided by m - 1, the normalising one by m.
        torch.nn.SyncBatchNorm does the same on GPUs only.
    """

    def __init__(
        self,
        num_features: int,
        group: ProcessGroup | None = None,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        if num_features < 1 or eps <= 0 or (momentum is not None and not 0 <= momentum <= 1):
            raise ValueError(
                f"SyncBatchNorm: num_features {num_features} must be at least 1, eps {eps} above 0, "
                f"momentum {momentum} in [0, 1] or None"
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.group = group
        self._agreed = False

    @classmethod
    def of(cls, layer: _BatchNorm, group: ProcessGroup | None = None) -> SyncBatchNorm:
        """Return a synchronised layer that shares the parameters and buffers of a torch layer."""
        new = cls(layer.num_features, group, eps=layer.eps, momentum=layer.momentum, affine=False)
        new.affine, new.track_running_stats = layer.affine, layer.track_running_stats
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        return new.train(layer.training)

    def facts(self) -> list[Any]:
        """Return what must be equal on all ranks."""
        trained = [tensor is not None and tensor.requires_grad for tensor in (self.weight, self.bias)]
        return [self.num_features, self.eps, self.momentum, self.track_running_stats, *trained]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise.

        Shapes: x [B, C, ...] -> [B, C, ...]
        """
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels expects [B, {self.num_features}, ...]; "
                f"got {list(x.shape)}: pass samples first and channels second"
            )
        if not self.training:  # ranks may evaluate different numbers of batches: nothing may be sent
            own = self.running_mean is None
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps
            )
        if not self._agreed:
            agree(self.facts(), self.group, what="SyncBatchNorm (features, eps, momentum, tracking, what is trained)")
            self._agreed = True
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        with torch.no_grad():
            statistics = group_statistics(exact, self.group)
            self._track(statistics)
        result: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            exact, self.weight, statistics, self.eps, self.group
        )
        if self.bias is not None:
            result = result + _by_channel(self.bias, x)
        return result.to(x.dtype)

    def _track(self, statistics: BatchStatistics) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None, "torch makes the three together"
        self.num_batches_tracked.add_(1)
        newest = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        variance = statistics.squares / (statistics.num_values - 1)
        self.running_mean.mul_(1 - newest).add_(statistics.mean, alpha=newest)
        self.running_var.mul_(1 - newest).add_(variance, alpha=newest)


def convert_sync_batchnorm(module: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
    """Put a SyncBatchNorm in the place of every batch norm, and return the module.

    Parameters and buffers stay the same objects, so an optimizer or a `DataParallel` that was built before stays valid;
    a layer that is used in two places stays one. Hooks of the old layers are not taken over: register them afterwards.

    Cost: agreement (40 bytes).

    Raises:
        ValueError: a lazy layer has no size yet, a layer has a forward of its own, or ranks have different layers.
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
    }
    lazy = [name for name, layer in layers.items() if isinstance(layer, _LazyNormBase)]
    if lazy:
        raise ValueError(f"{', '.join(lazy)}: a lazy layer has no channels yet; run one batch through the model first")
    torchs = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    own = [name for name, layer in layers.items() if type(layer).forward not in torchs or "forward" in vars(layer)]
    if own:
        raise ValueError(
            f"{', '.join(own[:4]) or 'the module'} ({type(layers[own[0]]).__name__}) has a forward of its own, which "
            "would be lost; write it as a torch.nn.BatchNorm and a module behind it, or convert the others one by one"
        )
    new = {layer: SyncBatchNorm.of(layer, group) for layer in layers.values()}
    facts = {name: new[layer].facts() for name, layer in layers.items()}
    agree(facts, group, what="batch norms (features, eps, momentum, tracking, what is trained)")
    for layer in new.values():
        layer._agreed = True
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # named_children() gives a layer with two names once
            if isinstance(child, _BatchNorm) and child in new:
                setattr(parent, name, new[child])
    return new[module] if isinstance(module, _BatchNorm) and module in new else module


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """[C] -> [1, C, 1, ...]: one value per channel of x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
