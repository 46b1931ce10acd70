"""Whatever goes wrong with a gradient on one rank is named on every rank, and no rank waits for ever."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from equal import Mean, same_everywhere
from refused import message

from distlab.comm import recorded
from distlab.data_parallel import DataParallel, SyncBatchNorm


class Words(torch.nn.Module):
    """An embedding and two layers, so that faults fall into different buckets."""

    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.skips = False

    def forward(self, tokens):
        x = self.words(tokens)
        return self.head(x if self.skips else self.middle(x))


TOKENS = torch.tensor([0, 1, 3])
BUCKETS = {"bucket_bytes": 60, "first_bucket_bytes": 20}


def loss_of(model):
    return model(TOKENS + dist.get_rank() % 2).square().mean()


def clean_step(model, replicas):
    model.words.sparse = model.skips = False
    replicas.zero_grad()
    loss_of(model).backward()
    replicas.synchronize()
    return model.head.weight.grad.sum().item()


def sparse_on_the_second(model, replicas):
    model.words.sparse = dist.get_rank() == 1  # one rank alone: the others must hear of it
    loss_of(model).backward()


def unused(model, replicas):
    model.skips = dist.get_rank() == 1
    loss_of(model).backward()


def second(model, replicas):
    for _ in range(2 - min(dist.get_rank(), 1)):  # rank 0 alone runs a second one
        loss_of(model).backward()


def second_under_no_sync(model, replicas):
    """First the backward that is sent, then one more that would be added to buckets on the wire."""
    loss_of(model).backward()
    with replicas.no_sync():
        loss_of(model).backward()


def added(model, replicas):
    if dist.get_rank() == 1:
        model.extra = torch.nn.Linear(2, 2)
    loss_of(model).backward()


def replaced(model, replicas):
    model.head.weight = torch.nn.Parameter(torch.zeros(2, 4))
    loss_of(model).backward()


def not_finite(model, replicas):
    replicas.step = 40  # as after a resume
    clean_step(model, replicas)
    clean_step(model, replicas)
    replicas.zero_grad()
    bad = {0: float("inf"), 1: float("nan")}.get(dist.get_rank(), 1.0)
    handle = model.middle.bias.register_hook(lambda gradient: gradient * bad)
    loss_of(model).backward()
    handle.remove()


def not_finite_accumulated(model, replicas):
    with replicas.no_sync():
        (loss_of(model) * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
    loss_of(model).backward()


def everything(model, replicas):
    model.words.sparse = dist.get_rank() == 0
    if dist.get_rank() == 1:
        model.head.bias.requires_grad_(False)
        model.middle.weight.register_hook(lambda gradient: gradient * float("nan"))
    loss_of(model).backward()


SECOND = "got a second gradient before synchronize()"
CASES = [  # what is done, whether training can go on, and words of the error
    (sparse_on_the_second, True, ["1 parameter got a sparse gradient", "words.weight (rank 1)", "sparse="]),
    (unused, True, ["2 parameters got no gradient", "middle.weight (rank 1)", "middle.bias (rank 1)"]),
    (second, True, ["RuntimeError", SECOND, "head.", "(rank 0)", "no_sync"]),
    (second_under_no_sync, True, [SECOND, "head.", "(rank 0, 1"]),
    (added, False, ["extra.weight was added after", "extra.bias was", "(rank 1)", "close() this one"]),
    (replaced, False, ["head.weight was added after DataParallel was built", "(rank 0, 1"]),
    (not_finite, True, ["NotFiniteError", "step 42: 1 parameter got", "that is not finite", "middle.bias (rank 0, 1)"]),
    (not_finite_accumulated, True, ["NotFiniteError", "step 0", "5 parameters", "words.weight (rank 1)"]),
    (everything, False, ["NotFinite", "middle.weight (rank 1)", "words.weight (rank 0)", "head.bias (rank 1)"]),
]


def goes_on_after(case, way, hook):
    """Meet a fault; return what one clean step makes after it."""
    act, goes_on, words = case
    torch.manual_seed(0)
    model = Words()
    way = {everything: "error", unused: "error", replaced: "zeros"}.get(act, way)
    replicas = DataParallel(model, **BUCKETS, hook=hook, unused=way)
    text = message(lambda: (act(model, replicas), replicas.synchronize()))
    assert all(word in text for word in (f"rank {dist.get_rank()}: ", *words)), (case, text)
    return clean_step(model, replicas) if goes_on else 0.0


@pytest.mark.on_ranks(3)
def test_a_fault_of_one_rank_is_named_on_every_rank_and_training_can_go_on():
    for way, hook in (("error", None), ("error", Mean()), ("zeros", None)):
        after = [goes_on_after(case, way, hook) for case in CASES]
        assert hook is None or all(bool(seen.isfinite().all()) for seen in hook.seen), "a hook is given what is finite"
        assert same_everywhere(torch.tensor(after)), "replicas differ afterwards"


@pytest.mark.on_ranks(2)
def test_a_step_with_nothing_to_tell_pays_nothing_and_a_hooked_one_four_bytes():
    for hooked, check_finite in product((False, True), (False, True)):
        model = Words()
        replicas = DataParallel(model, **BUCKETS, hook=Mean() if hooked else None, check_finite=check_finite)
        with recorded() as sent:
            loss_of(model).backward()
            replicas.synchronize()
        assert sent.records.num_calls() == replicas.num_buckets + hooked
        assert sent.records.payload_bytes(dist.get_rank()) == replicas.num_bytes + 4 * hooked
        if hooked:
            assert replicas.num_bytes == 4 * (5 * 4 + 4 * 4 + 4 + 4 * 2 + 2)  # gradients, and nothing else


@pytest.mark.on_ranks(2)
def test_large_gradients_that_are_finite_pass():
    """Their sum overflows, or would in their own type; they do not."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = torch.nn.Linear(300, 1, bias=False).to(dtype)
        replicas = DataParallel(model)
        large = torch.full((300,), torch.finfo(dtype).max / 2, dtype=dtype)
        (model.weight * large).sum().backward()
        replicas.synchronize()
        assert torch.equal(model.weight.grad[0], large)


def changed(change):
    """Build from a model that one rank has changed."""
    model = Words()
    if dist.get_rank() == 1:
        change(model)
    DataParallel(model)


def thawed_later():
    model = Words()
    model.head.requires_grad_(False)
    replicas = DataParallel(model)
    model.head.bias.requires_grad_(True)
    loss_of(model).backward()
    replicas.synchronize()


def norm_beside_buckets(group=None):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), SyncBatchNorm(2, group() if group else None))
    DataParallel(model, unused="zeros").close()


DISAGREE = "ranks disagree on parameters"
BAD = [
    (lambda: DataParallel(Words(), unused="ignore"), "unused is 'ignore'; choose one of error, zeros"),
    (lambda: DataParallel(Words(), bucket_bytes=0), "bucket_bytes is 0"),
    (lambda: DataParallel(Words(), first_bucket_bytes=0), "first_bucket_bytes is 0"),
    (lambda: DataParallel(Words().requires_grad_(False)), "no parameter of the module requires a gradient"),
    (lambda: DataParallel(Words(), bucket_bytes=dist.get_rank()), "bucket_bytes"),
    (lambda: DataParallel(Words(), unused=["zeros", "ignore"][dist.get_rank()]), "ignore"),
    (lambda: DataParallel(Words(), hook=[Mean(), None][dist.get_rank()]), "Mean"),
    (lambda: DataParallel(Words(), check_finite=dist.get_rank() == 0), "check_finite"),
    (lambda: changed(lambda model: setattr(model, "middle", torch.nn.Linear(4, 5))), DISAGREE),
    (lambda: changed(lambda model: model.middle.bias.requires_grad_(False)), DISAGREE),
    (lambda: changed(lambda model: model.head.double()), DISAGREE),
    (thawed_later, "head.bias was frozen when DataParallel was built"),
    (norm_beside_buckets, "1 sums over the group of the buckets"),
    (lambda: norm_beside_buckets(lambda: dist.group.WORLD), "1 sums over the group of the buckets"),
    (lambda: norm_beside_buckets(dist.new_group), "no error"),
]


@pytest.mark.on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    for action, words in BAD:
        text = message(action)
        assert words in text
        assert words != DISAGREE or "rank 1 has" in text
