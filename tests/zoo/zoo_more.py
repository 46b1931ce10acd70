"""More models of other kinds: convolutions with skips, recurrences by hand, codebooks, experts with losses aside."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint
from zoo_odd import CLASSES, WIDTH, Odd
from zoo_text import VOCAB


class UNet(nn.Module):
    """Two steps down, two up; what goes down is put beside what goes up. GroupNorm throughout."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([self.layer(3, 4), self.layer(4, 8)])
        self.middle = self.layer(8, 8)
        self.up = nn.ModuleList([self.layer(16, 4), self.layer(8, 4)])
        self.head = nn.Linear(4, CLASSES)

    def layer(self, width, out):
        return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())

    def forward(self, images):
        x, kept = images, []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x.mean((2, 3)))


class SelectiveScan(nn.Module):
    """A state space whose step, input and output depend on the token, as in Mamba; the scan is a loop."""

    def __init__(self):
        super().__init__()
        self.norm, self.enter = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.select, self.step = nn.Linear(WIDTH, 7), nn.Linear(1, WIDTH)
        self.log_decay = nn.Parameter(torch.arange(1, 4).float().log().repeat(WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        values, gate = self.enter(self.norm(x)).chunk(2, -1)
        values = F.silu(self.conv(values.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, write, read = self.select(values).split([1, 3, 3], -1)
        step = F.softplus(self.step(step))
        decay, state, outputs = -self.log_decay.exp(), x.new_zeros(x.shape[0], WIDTH, 3), []
        for t in range(x.shape[1]):
            change = (step[:, t] * values[:, t])[..., None] * write[:, t, None]
            state = (step[:, t, :, None] * decay).exp() * state + change
            outputs.append((state * read[:, t, None]).sum(-1) + self.skip * values[:, t])
        return x + self.leave(torch.stack(outputs, 1) * F.silu(gate))


class TimeMix(nn.Module):
    """Attention as a recurrence of a weighted mean, as in RWKV, with parameters that are mixed by hand."""

    def __init__(self):
        super().__init__()
        self.mix = nn.ParameterDict({name: torch.rand(WIDTH) for name in "kvr"})
        self.decay, self.first = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.key, self.value, self.receptance, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.norm(x)
        before = F.pad(y, (0, 0, 1, -1))
        key, value, receptance = (
            layer(y * self.mix[name] + before * (1 - self.mix[name]))
            for name, layer in zip("kvr", (self.key, self.value, self.receptance), strict=True)
        )
        total = norm = x.new_zeros(x.shape[0], WIDTH)
        outputs = []
        for t in range(x.shape[1]):
            now, weight = (self.first + key[:, t]).exp(), key[:, t].exp()
            outputs.append((total + now * value[:, t]) / (norm + now))
            total, norm = (torch.exp(-self.decay.exp()) * one for one in (total + weight * value[:, t], norm + weight))
        return x + self.out(receptance.sigmoid() * torch.stack(outputs, 1))


class OfTokens(nn.Module):
    """Blocks of a kind between an embedding and a head."""

    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Denoiser(Odd):
    """A diffusion model: each block is scaled and moved by an embedding of the time."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, images, time):
        waves = time[:, None] * torch.tensor([1.0, 0.1], dtype=images.dtype)
        scale, shift = self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, None].chunk(2, -1)
        x = self.embed(images.flatten(1).unflatten(1, (8, 24)))
        for block in self.blocks:
            x = x + block(x * (1 + scale) + shift)
        return self.head(x).flatten(1).view_as(images)


def of_noise(call, images, targets):
    """Predict the noise that was added at a time; both follow from the sample."""
    noise, time = torch.cos(40 * images), targets.to(images.dtype)
    kept = torch.cos(0.25 * time)[:, None, None, None]
    return F.mse_loss(call(kept * images + (1 - kept**2).sqrt() * noise, time), noise)


class Codebook(nn.Module):
    """The nearest of some vectors, straight through; the vectors are buffers that forward moves, in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        found = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest.flatten(), 6).to(x)
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ x.flatten(0, 1), alpha=0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
        return x + (found - x).detach(), F.mse_loss(x, found.detach())


class Quantised(Odd):
    """An autoencoder with a codebook, whose loss comes from the middle."""

    def __init__(self):
        super().__init__()
        self.codebook = Codebook()

    def body(self, x):
        x = self.blocks[0](x)
        x, self.commitment = self.codebook(x)
        return self.blocks[1](x)


class Experts(nn.Module):
    """Two experts; the router's loss stays in an attribute."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        self.router_loss = shares.square().mean() + self.router(x).logsumexp(-1).square().mean()
        return x + sum(shares[..., n, None] * expert(x).tanh() for n, expert in enumerate(self.experts))


class Routed(Odd):
    """Blocks that leave a loss in an attribute, which the training loop adds."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))


def with_losses_aside(call, images, targets):
    logits = call(images)
    model = getattr(call, "module", call)
    return F.cross_entropy(logits, targets) + 0.1 * sum(block.router_loss for block in model.blocks)


def with_hooked_features(call, images, targets):
    """A loss of what a forward hook took from the middle of the model."""
    model, taken = getattr(call, "module", call), []
    hooks = [block.register_forward_hook(lambda *given: taken.append(given[-1])) for block in model.blocks]
    logits = call(images)
    for hook in hooks:
        hook.remove()
    return F.cross_entropy(logits, targets) + 0.1 * sum(one.square().mean() for one in taken)


def with_commitment(call, images, targets):
    logits = call(images)
    return F.cross_entropy(logits, targets) + 0.2 * getattr(call, "module", call).commitment


def contrast(call, images, targets):
    """A Siamese net: one model for two inputs, called twice."""
    one, other = call(images), call(images.flip(-1))
    return 1 - F.cosine_similarity(one, other).mean() + F.cross_entropy(one, targets)


def two_backwards(call, images, targets):
    """A loss whose graph is used twice: backward runs here too, and keeps the graph."""
    loss = F.cross_entropy(call(images), targets)
    (0.5 * loss).backward(retain_graph=True)
    return 0.5 * loss


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Parametrized(Odd):
    """A symmetric and an orthogonal weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        parametrize.register_parametrization(self.blocks[0], "weight", Symmetric())
        nn.utils.parametrizations.orthogonal(self.blocks[1], use_trivialization=False)
        nn.utils.parametrizations.weight_norm(self.head)

    def body(self, x):
        with parametrize.cached():
            return super().body(x)


class Bags(nn.Module):
    """Sums of vectors, with sparse gradients."""

    def __init__(self, *, sparse):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCAB, WIDTH, mode="sum", sparse=sparse), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.bag(tokens))


def of_last_token(call, tokens, targets):
    return F.cross_entropy(call(tokens), targets[:, -1])


class Ensemble(Odd):
    """An ensemble whose members run side by side under vmap, from their stacked parameters."""

    def body(self, x):
        values = {
            name: torch.stack([block.get_parameter(name) for block in self.blocks])
            for name, _ in self.blocks[0].named_parameters()
        }
        return x + vmap(lambda one: functional_call(self.blocks[0], one, (x,)))(values).mean(0)


class Functional(Odd):
    """A block that is called with parameters which forward made."""

    def body(self, x):
        values = {name: 0.9 * value for name, value in self.blocks[0].named_parameters()}
        return x + functional_call(self.blocks[0], values, (x,)) + self.blocks[1](x)


@dataclass
class State:
    values: torch.Tensor
    name: str


@dataclass
class Output:
    state: State
    others: list


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        x = self.linear(state.state.values).tanh()
        return Output(State(state.state.values + x, "next"), [x, {"mean": x.mean(1, keepdim=True)}])


class Dataclasses(Odd):
    """Blocks that take and return dataclasses in dataclasses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inside() for _ in range(2))

    def body(self, x):
        output = Output(State(x, "first"), [])
        for block in self.blocks:
            output = block(output)
        return output.state.values + output.others[1]["mean"]


class Reentrant(Odd):
    """Blocks under torch's older checkpoint, which runs backward inside of backward."""

    def body(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x


class Writes(nn.Module):
    """A block that returns nothing: what it makes is in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.made = self.linear(x).tanh()


class InAttributes(Odd):
    """Blocks whose outputs are read from them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Writes() for _ in range(2))

    def body(self, x):
        for block in self.blocks:
            block(x)
            x = x + block.made
        return x


class Yields(nn.Module):
    """A generator as forward."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for linear in self.linears:
            yield linear(x).tanh()


class Generated(Odd):
    """A block that computes while its outputs are used."""

    def __init__(self):
        super().__init__()
        self.yields = Yields()

    def body(self, x):
        for one in self.yields(x):
            x = x + one
        return super().body(x)


class Pruned(Odd):
    """Weights and biases under masks, which hooks put in the place of parameters."""

    def __init__(self):
        super().__init__()
        for layer, name in ((self.blocks[0][0], "weight"), (self.blocks[0][2], "bias"), (self.head, "bias")):
            prune.l1_unstructured(layer, name, 0.4)


class Packed(Odd):
    """Packed sequences from one recurrent block to the next."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def body(self, x):
        lengths = x.detach().sum((1, 2)).abs().long() % x.shape[1] + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            packed = block(packed)[0]
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]


class BackwardHooks(Odd):
    """Module hooks that change gradients on their way, and outputs."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_full_backward_hook(
            lambda _, inner, outer: tuple(g if g is None else g / 2 for g in inner)
        )
        self.blocks[1].register_full_backward_pre_hook(lambda _, outer: tuple(0.7 * g for g in outer))
        self.blocks[1].register_forward_hook(lambda _, inputs, output: output * 0.9)


class MadeInForward(Odd):
    """A layer that the first forward makes."""

    def body(self, x):
        x = super().body(x)
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH).double()
        return self.late(x)


class Overlap(Odd):
    """Two parameters with the same memory, which torch counts as two."""

    def __init__(self):
        super().__init__()
        self.blocks[1][0].weight.data = self.blocks[0][0].weight.data

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.blocks[1][0].weight.data = self.blocks[0][0].weight.data
        return self
