"""Models as other people might bring them: weights by hooks and views, loops to a fixed point, teachers, own calls."""

import copy
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, rnn
from torch.utils.checkpoint import checkpoint_sequential
from zoo_odd import CLASSES, WIDTH, Odd


class CausalConvs(nn.Module):
    """Dilated convolutions whose weights a hook makes anew before each forward, as the older weight_norm does."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.blocks = nn.ModuleList(
                nn.utils.weight_norm(nn.Conv1d(24 if d == 1 else WIDTH, WIDTH, 3, dilation=d)) for d in (1, 2)
            )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = images.flatten(1).unflatten(1, (8, 24)).transpose(1, 2)
        for block in self.blocks:
            x = block(F.pad(x, (2 * block.dilation[0], 0))).tanh()
        return self.head(x[..., -1])


class TransposedTies(Odd):
    """An autoencoder: what decodes uses the weight that encoded, transposed, from inside of another block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 6), Decodes()])
        self.blocks[1].weight = self.blocks[0].weight

    def body(self, x):
        return x + self.blocks[1](self.blocks[0](x).tanh())


class Decodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(0)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class ReadsElsewhere(Odd):
    """The model itself uses a block's weight, outside of the block's forward."""

    def body(self, x):
        return super().body(x) @ self.blocks[0][0].weight.T @ self.blocks[0][0].weight


class OneVector(Odd):
    """All weights of a block are views of one long parameter, and one part is used in two shapes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Views() for _ in range(2))


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(0.3 * torch.randn(2 * WIDTH * WIDTH))

    def forward(self, x):
        first, second = self.theta.view(2, WIDTH, WIDTH)
        again = self.theta[: WIDTH * WIDTH].view(4, 2 * WIDTH).sum(0).view(2, WIDTH)
        return (x @ first + again[0]).tanh() @ second.mT + again[1]


class Dicts(Odd):
    """Dicts of modules in dicts, a dict of parameters, and parameters on the model itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.by_task = nn.ModuleDict(
            {task: nn.ModuleDict({"in": nn.Linear(WIDTH, WIDTH), "out": nn.Linear(WIDTH, WIDTH)}) for task in "ab"}
        )
        self.shift = nn.ParameterDict({task: nn.Parameter(torch.randn(WIDTH)) for task in "ab"})
        self.alone = nn.Parameter(torch.tensor([0.5]))

    def body(self, x):
        for task, parts in self.by_task.items():
            x = x + self.alone * parts["out"](parts["in"](x * self.scale).tanh() + self.shift[task])
        return super().body(x)


class WarmUp(Odd):
    """A buffer counts forward passes, and the first ones are damped."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def body(self, x):
        self.passes += 1
        return super().body(x) * (self.passes / 4).clamp(max=1.0)


class Centred(Odd):
    """A buffer that forward replaces by another tensor: the mean of what it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def body(self, x):
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean((0, 1))
        return super().body(x - self.centre)


def double_(parameter):
    parameter.grad.mul_(2)


class ParameterHooks(Odd):
    """Hooks that change gradients on their way to parameters."""

    def __init__(self):
        super().__init__()
        self.blocks[0][0].weight.register_hook(lambda gradient: 0.5 * gradient)
        self.head.bias.register_hook(lambda gradient: 2 * gradient)


class ArrivedHook(Odd):
    """A hook that changes a gradient when it has arrived."""

    def __init__(self):
        super().__init__()
        self.head.bias.register_post_accumulate_grad_hook(double_)


class TwoTypes(Odd):
    """One block computes in float32, the rest in float64."""

    def body(self, x):
        x = x + self.blocks[0](x.float()).to(x.dtype)
        return x + self.blocks[1](x)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.blocks[0]._apply(lambda tensor: tensor.float())
        return self


class FixedPoint(Odd):
    """A deep equilibrium: steps to a fixed point without a graph, one with, and backward through it by a hook."""

    steps, tolerance = 6, 0.0

    def body(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(self.steps):
                new = self.step(z, x)
                if (new - z).abs().max() < self.tolerance:
                    break
                z = new
        z = self.step(z, x)
        if not z.requires_grad:
            return z
        start = z.detach().requires_grad_()
        again = self.step(start, x)

        def solve(gradient):
            y = gradient
            for _ in range(self.steps):
                y = gradient + torch.autograd.grad(again, start, y, retain_graph=True)[0]
            return y

        z.register_hook(solve)
        return z

    def step(self, z, x):
        return 0.3 * (self.blocks[0](z) + self.blocks[1](x)).tanh()


class UntilClose(FixedPoint):
    """The same until two steps are close: each rank's samples take another number of steps."""

    steps, tolerance = 40, 1e-3


class StochasticDepth(Odd):
    """Blocks are left out by the numbers of a generator of the model's own, the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def body(self, x):
        for block in self.blocks:
            if torch.rand((), generator=self.draws) < 0.7:
                x = x + block(x) / 0.7
        return x


@dataclass(frozen=True, slots=True)
class Answer:
    states: torch.Tensor
    loss: torch.Tensor | None = None
    extras: tuple = (None, {})


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, before=None):
        y = self.linear(x).tanh()
        return Answer(x + y, None if before is None else (y * before.states).mean((1, 2), keepdim=True))


class FrozenAnswers(Odd):
    """Blocks that return frozen dataclasses with slots, some of whose fields are None."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Frozen() for _ in range(2))

    def body(self, x):
        first = self.blocks[0](x)
        second = self.blocks[1](first.states, before=first)
        assert first.loss is None
        return second.states + second.loss


class BothWays(Odd):
    """An LSTM that reads packed sequences in both directions and projects; its last states are used as well."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, num_layers=2, bidirectional=True, proj_size=4, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def body(self, x):
        lengths = x.detach().sum((1, 2)).abs().long() % x.shape[1] + 1
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, (hidden, cell) = self.lstm(packed)
        y = rnn.pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0]
        state = torch.cat([hidden[-2], hidden[-1]], -1), F.pad(cell[-1], (0, WIDTH - 6))
        for t in range(3):
            state = self.cell(y[:, t], state)
        return super().body(y + state[0][:, None])


class HashedExperts(Odd):
    """Of five experts the first two are asked, by turns of the sample's sign; the others never."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def body(self, x):
        y, chosen = torch.zeros_like(x), (x.detach().sum((1, 2)) > 0).long()
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            y = y.index_add(0, rows, self.experts[number](x[rows]))
        return super().body(x + y.tanh())


class Teacher(Odd):
    """A frozen copy of the blocks that follows them in each forward, and the model is drawn to what it says."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def body(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        taught = self.teacher[1](self.teacher[0](x))
        return super().body(x) - 0.3 * taught


class Uncertain(Odd):
    """The weights of two losses are parameters of the model, which the loss reads."""

    def __init__(self):
        super().__init__()
        self.log_scales = nn.Parameter(torch.tensor([0.1, -0.2]))


def weighted(call, images, targets):
    logits, model = call(images), getattr(call, "module", call)
    one, other = F.cross_entropy(logits, targets), logits.square().mean()
    scales = model.log_scales
    return (one * (-scales[0]).exp() + other * (-scales[1]).exp() + scales.sum()).squeeze()


class Strides(Odd):
    """Parameters that are not contiguous: a transposed one, and convolutions with channels last."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 3).T)
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, images):
        return super().forward(images + self.conv(images)[:, ::2])

    def body(self, x):
        return super().body(x) + (x @ self.turned.T).tanh() @ self.turned


class OwnCall(Odd):
    """`__call__` is the model's own, and blocks are called by other names than forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Named() for _ in range(2))

    def __call__(self, *inputs, **options):
        return 0.5 * super().__call__(*inputs, **options)

    def body(self, x):
        for block in self.blocks:
            x = x + block.compute(x)
        return x


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, x):
        return self.linear(x).tanh()


class Marked(torch.Tensor):
    """A tensor with a class of its own."""


class OwnTensors(Odd):
    """A parameter of a class of tensors of the model's own."""

    def __init__(self):
        super().__init__()
        self.marked = nn.Parameter(torch.randn(WIDTH).as_subclass(Marked))

    def body(self, x):
        return super().body(x + self.marked.as_subclass(torch.Tensor))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_non_differentiable(sign := x.sign())
        return x.view_as(x), sign

    @staticmethod
    def backward(ctx, gradient, _):
        return -gradient


class Reversed(Odd):
    """A head whose gradient is turned round before it comes to the rest, and a second output without one."""

    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        x = super().body(x)
        y, sign = Reverse.apply(x)
        return x + 0.1 * self.domain(y) * sign


class InSegments(Odd):
    """torch's checkpoint over segments of a sequence of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks, nn.Linear(WIDTH, WIDTH))

    def body(self, x):
        return x + checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


class KeepsWeight(Odd):
    """A block makes a weight once and uses it in each call of a forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Keeps()])

    def body(self, x):
        self.blocks[0].made = None
        for _ in range(3):
            x = x + self.blocks[0](x)
        return x


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.made = None

    def forward(self, x):
        if self.made is None:
            self.made = self.low @ self.high
        return (x @ self.made).tanh()


class Nothing(Odd):
    """Parameters without an element: one among others, and one that is alone of its type."""

    def __init__(self):
        super().__init__()
        self.none, self.other = nn.Parameter(torch.empty(0, WIDTH)), Other()

    def body(self, x):
        return self.other(super().body(x) + self.none.sum())


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(3, 0))

    def forward(self, x):
        return x + self.none.sum().to(x.dtype)

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: fn(tensor).float(), recurse)


class FromOther(nn.Module):
    """Makes a weight from the weight of another layer, which it holds as its own."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, weight):
        return weight + 0.5 * self.other.weight.T


class Borrowed(Odd):
    """A parametrization of one block that reads the weight of another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        parametrize.register_parametrization(self.blocks[1], "weight", FromOther(self.blocks[0]))
