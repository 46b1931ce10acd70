"""Whatever goes wrong with a gradient on one rank is named on every rank, and no rank waits for ever."""

import pytest
import torch
import torch.distributed as dist
from equal import Mean
from refused import message

from distlab.blocks.clip import NotFiniteError
from distlab.blocks.gradients.gradient_status import NOT_FINITE, SPARSE, TWICE, UNUSED, USED, Reports
from distlab.comm import recorded
from distlab.data_parallel import DataParallel, SyncBatchNorm


class Words(torch.nn.Module):
    """An embedding between two layers, so that faults fall into different buckets."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = torch.nn.Embedding(5, 4)
        self.words.sparse = sparse
        self.middle, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.middle(self.words(tokens)))


TOKENS = torch.tensor([0, 1, 3])
BUCKETS = {"bucket_bytes": 60, "first_bucket_bytes": 20}


def loss_of(model):
    return model(TOKENS + dist.get_rank() % 2).square().mean()


def clean_step(model, replicas):
    model.words.sparse = False
    replicas.zero_grad()
    loss_of(model).backward()
    replicas.synchronize()
    return model.head.weight.grad.sum().item()


def nothing(model, replicas):
    pass


def sparse_on_the_second(model, replicas):
    model.words.sparse = dist.get_rank() == 1  # one rank alone: the others must hear of it


def second(model, replicas):
    if dist.get_rank() == 0:
        loss_of(model).backward()


def second_under_no_sync(model, replicas):
    """First the backward that is sent, then one more that would be added to buckets on the wire."""
    with replicas.no_sync():
        loss_of(model).backward()


def added(model, replicas):
    if dist.get_rank() == 1:
        model.extra = torch.nn.Linear(2, 2)


def replaced(model, replicas):
    model.head.weight = torch.nn.Parameter(torch.zeros(2, 4))


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


def everything(model, replicas):
    model.words.sparse = dist.get_rank() == 0
    if dist.get_rank() == 1:
        model.head.bias.requires_grad_(False)
        model.middle.weight.register_hook(lambda gradient: gradient * float("nan"))


SECOND = "got a second gradient before synchronize()"
CASES = [  # what is done before a backward pass and after it, whether training can go on, and words of the error
    (sparse_on_the_second, nothing, True, ["1 parameter got a sparse gradient", "words.weight (rank 1)", "sparse="]),
    (nothing, second, True, ["RuntimeError", SECOND, "head.", "(rank 0)", "no_sync"]),
    (nothing, second_under_no_sync, True, [SECOND, "head.", "(rank 0, 1"]),
    (added, nothing, False, ["extra.weight was added after", "extra.bias was", "(rank 1)", "close() this one"]),
    (replaced, nothing, False, ["head.weight was added after DataParallel was built", "(rank 0, 1"]),
    (nothing, not_finite, True, ["NotFiniteError", "step 42: not finite", "1 gradient: middle.bias (rank 0, 1)"]),
    (not_finite_accumulated, nothing, True, ["NotFiniteError", "step 0", "5 gradients", "words.weight (rank 1)"]),
    (
        everything,
        nothing,
        False,
        ["NotFinite", "middle.weight (rank 1)", "words.weight (rank 0)", "head.bias (rank 1)"],
    ),
]


def every_case(hooked, unused):
    """Return what each case says, and what one clean step makes after it, to show that every rank can go on."""
    found = []
    for before, after, goes_on, _ in CASES:
        torch.manual_seed(0)
        model = Words()
        every = {everything: "error", replaced: "zeros"}.get(before, unused)
        replicas = DataParallel(model, **BUCKETS, hook=Mean() if hooked else None, unused=every)

        def act(model=model, replicas=replicas, before=before, after=after):
            before(model, replicas)
            if after is not not_finite:
                loss_of(model).backward()
            after(model, replicas)
            replicas.synchronize()

        found.append((message(act), clean_step(model, replicas) if goes_on else 0.0))
    return found


@pytest.mark.parametrize(("world_size", "hooked"), [(2, False), (2, True), (3, False)])
def test_a_fault_of_one_rank_is_named_on_every_rank_and_training_can_go_on(ranks, world_size, hooked):
    unused = "error" if world_size == 2 else "zeros"
    results = ranks(world_size).run(every_case, hooked, unused)
    for number, (*case, _, words) in enumerate(CASES):
        for rank, result in enumerate(results):
            text, after = result[number]
            assert f"rank {rank}: " in text, (case, text)
            assert all(word in text for word in words), (case, text)
            assert after == results[0][number][1], f"{case}: replicas differ afterwards"


def test_a_step_with_nothing_to_tell_pays_nothing_and_a_hooked_one_four_bytes(ranks):
    def count(hooked, check_finite):
        model = Words()
        hook = Mean() if hooked else None
        replicas = DataParallel(model, **BUCKETS, hook=hook, check_finite=check_finite)
        with recorded() as sent:
            loss_of(model).backward()
            replicas.synchronize()
        return (
            sent.records.num_calls(),
            sent.records.payload_bytes(dist.get_rank()),
            replicas.num_buckets,
            replicas.num_bytes,
        )

    for check_finite in (True, False):
        for calls, num_bytes, num_buckets, bucket_bytes in ranks(2).run(count, False, check_finite):
            assert (calls, num_bytes) == (num_buckets, bucket_bytes)
        for calls, num_bytes, num_buckets, bucket_bytes in ranks(2).run(count, True, check_finite):
            assert (calls, num_bytes) == (num_buckets + 1, bucket_bytes + 4)
            assert bucket_bytes == 4 * (5 * 4 + 4 * 4 + 4 + 4 * 2 + 2)  # gradients, and nothing else


def test_unchecked_nan_reaches_every_rank_as_it_is(ranks):
    def train(hooked):
        model = Words()
        replicas = DataParallel(model, hook=Mean() if hooked else None, check_finite=False)
        (loss_of(model) * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
        replicas.synchronize()
        return bool(model.head.weight.grad.isnan().all())

    assert ranks(2).run(train, False) == ranks(2).run(train, True) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.on_ranks(2)
def test_large_gradients_that_are_finite_pass(dtype):
    """Their sum overflows, or would in their own type; they do not."""
    model = torch.nn.Linear(300, 1, bias=False).to(dtype)
    replicas = DataParallel(model)
    large = torch.finfo(dtype).max / 2
    (model.weight * torch.full((300,), large, dtype=dtype)).sum().backward()
    replicas.synchronize()
    assert model.weight.grad.float().tolist() == [[torch.tensor(large, dtype=dtype).float().item()] * 300]


@pytest.mark.on_ranks(2)
def test_a_hook_is_not_given_what_is_not_finite():
    model, hook = Words(), Mean()
    replicas = DataParallel(model, **BUCKETS, hook=hook)
    model.middle.weight.register_hook(lambda gradient: gradient * float("inf"))
    loss_of(model).backward()
    with pytest.raises(NotFiniteError):
        replicas.synchronize()
    assert all(bool(buffer.isfinite().all()) for buffer in hook.seen)
    assert len(hook.seen) == replicas.num_buckets


@pytest.mark.on_ranks(3)
def test_a_hook_gets_the_undivided_gradients_in_one_order():
    torch.manual_seed(0)
    model, alone, hook = Words(), Words(), Mean()
    replicas = DataParallel(model, **BUCKETS, hook=hook)
    alone.load_state_dict(model.state_dict())
    loss_of(model).backward()
    loss_of(alone).backward()
    replicas.synchronize()
    own = torch.cat([p.grad.flatten() for p in (alone.head.bias, alone.head.weight)])
    assert torch.equal(torch.cat(hook.seen)[: own.numel()], own)
    assert [len(seen) for seen in hook.seen] == [10, 4, 16, 20]


def test_options_that_differ_between_ranks_are_an_error_on_every_rank(ranks):
    def build(options):
        return message(lambda: DataParallel(Words(), **options[dist.get_rank()]))

    for options, words in [
        ([{"bucket_bytes": 0}, {}], "bucket_bytes"),
        ([{}, {"unused": "ignore"}], "ignore"),
        ([{"hook": Mean()}, {}], "Mean"),
        ([{"check_finite": False}, {}], "check_finite"),
    ]:
        assert all(words in text for text in ranks(2).run(build, options))


def test_what_is_judged_and_how_it_is_worded():
    names = ["a", "b"]
    fine = Reports([[USED, USED]] * 2, [[], []])
    assert fine.error(names, unused="error", step=0) is None
    one = Reports([[UNUSED, USED], [USED, USED]], [[], []])
    assert one.error(names, unused="zeros", step=0) is None
    assert "1 parameter got no gradient on some rank of the group: a (rank 0)" in str(
        one.error(names, unused="error", step=0)
    )
    mixed = Reports([[SPARSE, TWICE], [NOT_FINITE, USED]], [["x was added"], []])
    error = mixed.error(names, unused="zeros", step=7)
    assert isinstance(error, NotFiniteError)
    for words in ("step 7: ", "a (rank 1)", "sparse gradient", "b (rank 0)", "x was added (rank 0)"):
        assert words in str(error)


def norms_beside_buckets():
    texts = []
    for group in (None, dist.group.WORLD, dist.new_group()):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), SyncBatchNorm(2, group))
        texts.append(message(lambda model=model: DataParallel(model, unused="zeros").close()))
        DataParallel(model).close()  # every rank takes the same way, or is told
    return texts


def test_a_norm_that_shares_the_group_is_refused_where_ranks_may_branch(ranks):
    for default, world, own in ranks(2).run(norms_beside_buckets):
        assert "1 sums over the group of the buckets" in default
        assert default == world
        assert own == "no error"
