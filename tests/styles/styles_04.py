"""Right answers to lesson 4, written in other ways than the reference."""

import functools
import math

import torch
import torch.distributed as dist


def rate_by_min(step, base_lr, *, batch, base_batch, num_warmup):
    part = min(1.0, (step + 1) / num_warmup) if num_warmup else 1.0
    return part * base_lr * (batch / base_batch)


def rate_by_max(step, base_lr, *, batch, base_batch, num_warmup):
    return base_lr / base_batch * batch * min(step + 1, max(num_warmup, 1)) / max(num_warmup, 1)


def accumulate_sums(model, microbatches, loss_fn):
    total = sum(x.shape[0] for x, _ in microbatches) * dist.get_world_size()
    losses = (loss_fn(model(x), y) * x.shape[0] / total for x, y in microbatches)
    for loss in losses:
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


def accumulate_with_autograd_grad(model, microbatches, loss_fn):
    parameters, num_samples = list(model.parameters()), sum(len(x) for x, _ in microbatches)
    totals = [torch.zeros_like(p) for p in parameters]
    for x, y in microbatches:
        for total, grad in zip(totals, torch.autograd.grad(loss_fn(model(x), y), parameters), strict=True):
            total.add_(grad, alpha=len(x) / num_samples)
    for p, total in zip(parameters, totals, strict=True):
        dist.all_reduce(total)
        p.grad = total / dist.get_world_size()


def lars_by_where(weight, gradient, buffer, *, lr, momentum, decay, coefficient):
    if weight.ndim == 1:
        new = buffer * momentum + gradient * lr
        return weight - new, new
    norm, below = torch.linalg.norm(weight), torch.linalg.norm(gradient) + decay * torch.linalg.norm(weight)
    usable = (norm > 0) & (below > 0)
    ratio = torch.where(usable, coefficient * norm / torch.where(usable, below, 1.0), 1.0)
    new = buffer * momentum + (gradient + weight * decay) * (lr * ratio)
    return weight - new, new


def lars_on_copies(weight, gradient, buffer, *, lr, momentum, decay, coefficient):
    weight, update, buffer = weight.clone(), gradient.clone(), buffer.clone()
    ratio = 1.0
    if weight.dim() != 1:
        own, other = weight.square().sum().sqrt().item(), gradient.square().sum().sqrt().item()
        update.add_(weight, alpha=decay)
        ratio = coefficient * own / (other + decay * own) if own and other + decay * own else 1.0
    buffer.mul_(momentum).add_(update, alpha=lr * ratio)
    return weight.sub_(buffer), buffer


def lamb_with_lerp(weight, gradient, mean, square, *, step, lr, decay):
    mean, square = torch.lerp(mean, gradient, 0.1), torch.lerp(square, gradient * gradient, 0.001)
    first, second = mean / (1 - math.pow(0.9, step)), square / (1 - math.pow(0.999, step))
    update = torch.addcdiv(decay * weight, first, torch.sqrt(second) + 1e-6)
    norms = weight.norm().item(), update.norm().item()
    stretch = norms[0] / norms[1] if all(norms) else 1.0
    return torch.sub(weight, update, alpha=lr * stretch), mean, square


def lamb_in_place_on_copies(weight, gradient, mean, square, *, step, lr, decay):
    mean, square, weight = mean.clone(), square.clone(), weight.clone()
    mean.mul_(0.9).add_(gradient, alpha=0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    update = mean.div(1 - 0.9**step).div_(square.div(1 - 0.999**step).sqrt_().add_(1e-6)).add_(weight, alpha=decay)
    own, other = weight.norm(), update.norm()
    weight -= lr * (own / other if own > 0 and other > 0 else torch.ones_like(own)) * update
    return weight, mean, square


class WarmUp:
    """What is called before an update is an instance."""

    def __init__(self, optimizer, peak_lr, *, num_warmup, first_step):
        self.optimizer, self.peak_lr, self.num_warmup, self.step = optimizer, peak_lr, num_warmup, first_step

    def __call__(self):
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_lr if self.step >= self.num_warmup else self.peak_lr * self.step / self.num_warmup


def _set_rates(optimizer, peak_lr, num_warmup, count):
    rate = peak_lr * min(1, (count[0] + 1) / num_warmup)
    count[0] += 1
    for group in optimizer.param_groups:
        group["lr"] = rate


def repair_by_partial(optimizer, peak_lr, *, num_warmup, first_step):
    return functools.partial(_set_rates, optimizer, peak_lr, num_warmup, [first_step])


repair_of_a_class = WarmUp
