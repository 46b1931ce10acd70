"""Right answers to the exercises of lesson 9 that run a stage, written in other ways than the references."""

import torch
import torch.distributed as dist


class RunRank:
    """One method per kind of action."""

    def __call__(self, stage, actions, inputs, targets, loss_fn, like):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.num, self.like, self.kept, self.sent, self.losses = len(actions) // 2, like, {}, [], []
        for action in actions:
            if action.kind == "F":
                self.forward(stage, action.microbatch, inputs, targets, loss_fn)
            else:
                self.backward(action.microbatch)
        for request, _ in self.sent:
            request.wait()
        return sum(self.losses) if self.rank == self.last else None

    def receive(self, peer):
        tensor = torch.zeros_like(self.like)
        dist.irecv(tensor, peer).wait()
        return tensor

    def send(self, tensor, peer):
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, peer), tensor))

    def forward(self, stage, i, inputs, targets, loss_fn):
        x = inputs[i] if self.rank == 0 else self.receive(self.rank - 1).requires_grad_(True)
        out = stage(x)
        if self.rank == self.last:
            out = loss_fn(out, targets[i]) / self.num
            self.losses.append(float(out.detach()))
        else:
            self.send(out, self.rank + 1)
        self.kept[i] = (x, out)

    def backward(self, i):
        x, out = self.kept.pop(i)
        out.backward(None if self.rank == self.last else self.receive(self.rank + 1))
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)


def run_rank_with_autograd_grad(stage, actions, inputs, targets, loss_fn, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    num, parameters = sum(one.kind == "F" for one in actions), [p for p in stage.parameters() if p.requires_grad]
    kept, leaving, total = {}, [], 0.0
    for action in actions:
        i = action.microbatch
        if action.kind == "F":
            x = inputs[i] if rank == 0 else torch.empty_like(like)
            if rank:
                dist.recv(x, rank - 1)
            x = x.detach().requires_grad_()
            kept[i] = x, stage(x)
            if rank < last:
                leaving.append(dist.isend(kept[i][1].detach(), rank + 1))
            else:
                kept[i] = x, loss_fn(kept[i][1], targets[i]) / num
                total += kept[i][1].item()
            continue
        x, y = kept.pop(i)
        grad = None
        if rank < last:
            grad = torch.empty_like(like)
            dist.recv(grad, rank + 1)
        of_x, *others = torch.autograd.grad(y, [x, *parameters], grad)
        for parameter, new in zip(parameters, others, strict=True):
            parameter.grad = new if parameter.grad is None else parameter.grad + new
        if rank:
            leaving.append(dist.isend(of_x, rank - 1))
    [work.wait() for work in leaving]
    return total if rank == last else None


def run_rank_scaled_at_the_start(stage, actions, inputs, targets, loss_fn, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    microbatches = {one.microbatch for one in actions}
    seed = torch.tensor(1 / len(microbatches), dtype=like.dtype)
    graphs, pending, losses = {}, [], []
    for _, kind, i in actions:
        if kind == "F":
            x = torch.empty_like(like) if rank else inputs[i].detach().clone()
            if rank:
                dist.recv(x, src=rank - 1)
            graphs[i] = [x.requires_grad_(), stage(x)]
            if rank != last:
                pending.append(dist.isend(graphs[i][1].detach(), dst=rank + 1))
            else:
                graphs[i][1] = loss_fn(graphs[i][1], targets[i])
                losses.append(graphs[i][1].item())
        else:
            x, y = graphs.pop(i)
            upstream = seed if rank == last else torch.empty_like(like)
            if rank != last:
                dist.recv(upstream, src=rank + 1)
            torch.autograd.backward(y, upstream)
            if rank != 0:
                pending.append(dist.isend(x.grad, dst=rank - 1))
    while pending:
        pending.pop().wait()
    if rank == last:
        return sum(losses) / len(losses)
    return None


def forward_all_in_two_loops(stage, inputs, num_microbatches, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    outputs, works = [], []
    for i in range(num_microbatches):
        x = inputs[i] if rank == 0 else torch.zeros_like(like)
        if rank > 0:
            dist.irecv(x, rank - 1).wait()
        with torch.no_grad():
            outputs.append(stage(x).contiguous())
        if rank != last:
            works.append(dist.isend(outputs[-1], rank + 1))
    for work in works:
        work.wait()
    works = [dist.broadcast(y, src=last, async_op=True) for y in outputs]
    for work in works:
        work.wait()
    return outputs


@torch.no_grad()
def forward_all_one_broadcast(stage, inputs, num_microbatches, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    whole = like.new_empty(num_microbatches, *like.shape)
    leaving = []
    for i in range(num_microbatches):
        x = torch.empty_like(like)
        if rank:
            dist.recv(x, rank - 1)
        y = stage(x if rank else inputs[i])
        if rank == last:
            whole[i] = y
        else:
            leaving.append((dist.isend(y.contiguous(), rank + 1), y))
    for work, _ in leaving:
        work.wait()
    dist.broadcast(whole, last)
    return list(whole)


def forward_all_with_a_helper(stage, inputs, num_microbatches, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def came(i):
        if rank == 0:
            return inputs[i]
        buffer = torch.empty_like(like)
        dist.recv(buffer, rank - 1)
        return buffer

    def handed_on(y):
        return y, (dist.isend(y, rank + 1) if rank < last else None)

    sent = [handed_on(stage(came(i)).detach()) for i in range(num_microbatches)]
    found = []
    for y, work in sent:
        if work is not None:
            work.wait()
        found.append(y)
    for y in found[::-1]:
        dist.broadcast(y, last)
    return found


ANSWERS = {
    "09.run_rank": [RunRank(), run_rank_with_autograd_grad, run_rank_scaled_at_the_start],
    "09.repair": [forward_all_in_two_loops, forward_all_one_broadcast, forward_all_with_a_helper],
}
