"""The two halves of the ring, and the relay to be repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from distlab_lesson_02.checks import shared
from torch import Tensor

from distlab.course.grading.cases import Cases, Given
from distlab.grading import Evidence, Fault, Mutant

JUNK = -1000.0  # times rank + 1: what stands in memory that an all-gather must fill


def _use_reduce_scatter(fn: Callable[..., Any], length: int, members: tuple[int, ...]) -> Any:
    """Return what holds for every way to use the rest of the tensor."""
    place, n = shared.place_in(members)
    tensor = shared.coded(place, length)
    returned = shared.called(fn, members, tensor)
    if isinstance(returned, str):
        return returned
    memory = returned.untyped_storage().data_ptr() if isinstance(returned, Tensor) else None
    return {
        "what is returned": returned,
        "its chunk of the tensor afterwards": tensor.tensor_split(n)[place],
        "what is returned is a view into the tensor": memory == tensor.untyped_storage().data_ptr(),
    }


def _gathered(rank: int, n: int) -> Given:
    return shared.cases(n, "1, 2, 3, ...; -1000 x (rank + 1) where not filled", shared.MEMBERS.get(n, ()))


def _use_all_gather(fn: Callable[..., Any], length: int, members: tuple[int, ...]) -> Any:
    """Gather into a tensor of which only this rank's chunk is filled."""
    place, n = shared.place_in(members)
    tensor = torch.full((length,), JUNK * (place + 1), dtype=torch.float64)
    tensor.tensor_split(n)[place].copy_(torch.arange(1.0, length + 1).tensor_split(n)[place])
    returned = shared.called(fn, members, tensor)
    return returned if isinstance(returned, str) else {"what is returned": returned, "the tensor afterwards": tensor}


drive_ring_reduce_scatter = Cases(shared.sums, _use_reduce_scatter, 1.1, "a ring (every chunk but the one you keep)")
drive_ring_all_gather = Cases(_gathered, _use_all_gather, 1.1, "a ring (every chunk but the next rank's own)")
drive_repair = Cases(shared.sums, shared.use_sum, needs="the relay ((n - 1) S)")
failure_ring_reduce_scatter = failure_ring_all_gather = failure_repair = shared.failure
budget_ring_reduce_scatter = budget_ring_all_gather = partial(shared.budget, formula="(n-1)/n S")
budget_repair = partial(shared.budget, formula="(n-1) S")


def judge_ring_reduce_scatter(evidence: Evidence) -> Iterator[Fault]:
    """Look at steps and neighbours."""
    yield from shared.in_steps(evidence, "a ring", lambda n: n - 1)
    for case, ranks, made in shared.played(evidence):
        n, peers = len(ranks), [{call.peer for call in shared.sent(own)} for own in made]
        is_back = all(own <= {ranks[place - 1]} for place, own in enumerate(peers))  # a ring may go either way round
        for place, own in enumerate(peers):
            after = ranks[(place + (-1 if is_back else 1)) % n]
            if others := sorted(own - {after}):
                text = f"right result, but {case}: rank {ranks[place]} of {n} also sends to rank {others[0]}; in a ring"
                advice = f"it sends to rank {after} only, so that {n} wires are enough, and none is crossed twice"
                yield Fault("not a ring", f"{text} {advice} in a step")


judge_ring_all_gather = judge_ring_reduce_scatter
judge_repair = partial(shared.in_steps, what="the relay", needs=lambda n: n - 1)

_EXCHANGE = "exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)"
_MY_CHUNK = ".tensor_split(dist.get_world_size(group))[dist.get_rank(group)]"
_WHOLE = "whole tensors travel; a chunk is enough in each step"
_TO, _REST = "at * size + size", "at * size + size if at < n - 1 else None"
_CUTS = tuple(
    Mutant(name, "cut otherwise", f"chunks are cut {how}; tensor_split(n) cuts 7 into 4, 3, or 3, 2, 2", world).edit(
        "tensor.tensor_split(n)", f"[tensor[at * (size := {size}) : {end}] for at in range(n)]"
    )
    for name, how, size, end, world in (
        ("as chunk cuts", "as by chunk(n), 7 into 3, 3, 1", "-(-len(tensor) // n)", _TO, 3),
        ("rest to the last", "so that the last gets the rest, 7 into 2, 2, 3", "len(tensor) // n", _REST, 2),
    )
)
WRONG_RING_REDUCE_SCATTER = (
    Mutant("whole tensors travel", "whole tensors", _WHOLE, 2, 1).body(
        f"return relay_all_reduce(tensor, group){_MY_CHUNK}"
    ),
    Mutant(
        "starts one chunk late",
        "wrong chunk finished",
        "a different chunk is finished, not this rank's own; the first chunk that rank r sends is (r - 1) % n",
        2,
    )
    .edit("(rank - step - 1)", "(rank - step)")
    .edit("(rank - step - 2)", "(rank - step - 1)"),
    Mutant(
        "the neighbour's",
        "wrong chunk returned",
        "the next rank's chunk is finished and returned; rank r keeps chunk r, and first sends chunk (r - 1) % n",
        2,
    )
    .edit("(rank - step - 1)", "(rank - step)")
    .edit("(rank - step - 2)", "(rank - step - 1)")
    .edit("return chunks[rank]", "return chunks[(rank + 1) % n]"),
    Mutant(
        "copies instead of adding",
        "own part overwritten",
        "what arrives is copied over this rank's own part; add it to what is there",
        2,
        2,
    )
    .edit("scratch[: grows.numel()]", "grows")
    .without("grows += received"),
    Mutant("one step too many", "too many steps", "a ring of 3 ranks takes 2", 3).edit("range(n - 1)", "range(n)"),
    Mutant(
        "L // n elements per chunk",
        "wrong length",
        "chunks are tensor.tensor_split(n), the first L % n of them one element longer",
        2,
        8,
    ).edit("tensor.tensor_split(n)", "tensor[: tensor.numel() // n * n].tensor_split(n)"),
    *(wrong.edit("empty_like(chunks[0])", "empty_like(tensor)") for wrong in _CUTS),
    Mutant(
        "passes on what came",
        "own part not passed on",
        "what came is passed on without this rank's part; add it, then pass on the sum",
        3,
        2,
    )
    .without("outgoing = chunks[(rank - step - 1) % n]")
    .edit("scratch = torch.empty_like(chunks[0])", "outgoing = chunks[(rank - 1) % n]")
    .edit("scratch[: grows.numel()]", "torch.empty_like(grows)")
    .edit("grows += received", "grows += received\noutgoing = received"),
    shared.averaged("chunks[rank]"),
    Mutant("send, then receive", "deadlock", "one exchange", 2, 3).edit(
        _EXCHANGE,
        """
        exchange(Send(outgoing, (rank + 1) % n), group=group)
        exchange(Receive(received, (rank - 1) % n), group=group)
        """,
    ),
    Mutant("no neighbours", "not a ring", "also sends to rank 2", 3)
    .edit("(rank - step - 1)", "(rank + step + 1)")
    .edit("(rank - step - 2) % n", "rank")
    .edit(_EXCHANGE, _EXCHANGE.replace("rank - 1", "rank - step - 1").replace("rank + 1", "rank + step + 1")),
    Mutant(
        "a copy of the chunk",
        "a copy",
        "the chunk is returned as a copy, in memory of its own; return the chunk of tensor.tensor_split(n), a view",
        1,
    ).edit("return chunks[rank]", "return chunks[rank].clone()"),
    Mutant(
        "works on a copy", "not in place", "the sums stand in a copy; add to the chunks of the tensor passed in", 2
    ).edit("tensor.tensor_split", "tensor.clone().tensor_split"),
    Mutant("calls all_reduce", "torch's own collective", "all_reduce", 2, "common shortcut").body(
        f"dist.all_reduce(tensor, group=group)\nreturn tensor{_MY_CHUNK}"
    ),
    Mutant("through float32", "values", "float32 somewhere", 4, "one dtype").edit(
        "grows += received", "grows += received.float().to(grows.dtype)"
    ),
)
_INTO = "exchange(Receive(unknown"
WRONG_RING_ALL_GATHER = (
    Mutant(
        "another rank's chunk first",
        "own chunk lost",
        "a rank's own chunk is overwritten; in step 0 it sends that, and receives the chunk of the rank before",
        2,
    )
    .edit("(rank - step)", "(rank - step + 1)")
    .edit("(rank - step - 1)", "(rank - step)"),
    Mutant(
        "sends too early",
        "sent before it was there",
        "a chunk is sent before it has come; in step 0 a rank has its own alone, later what came in the step before",
        3,
    ).edit(
        "(rank - step) % n], chunks[(rank - step - 1) % n]", "(rank - step - 1) % n], chunks[(rank - step - 2) % n]"
    ),
    Mutant("adds instead of copying", "added", "what arrives is added; the chunks are finished: copy them", 2)
    .edit(_INTO, "received = torch.empty_like(unknown)\nexchange(Receive(received")
    .edit("group=group)", "group=group)\nunknown += received"),
    Mutant(
        "n-2 steps", "chunk never received", "a chunk never comes to its place; each of n - 1 steps fills one", 2
    ).edit("n - 1):", "n - 2):"),
    Mutant("whole tensors travel", "whole tensors", _WHOLE, 2, 1)
    .edit(_INTO, "received = torch.empty_like(tensor)\nexchange(Receive(received")
    .edit("Send(known", "Send(tensor.clone()")
    .edit("group=group)", "group=group)\nunknown.copy_(received.tensor_split(n)[(rank - step - 1) % n])"),
    Mutant("no neighbours", "not a ring", "also sends to rank 2", 3)
    .edit("(rank - step) % n", "rank")
    .edit("(rank - 1)", "(rank - step - 1)")
    .edit("(rank + 1)", "(rank + step + 1)"),
    Mutant("returns its chunk", "wrong length", "this rank's chunk is returned; return the whole tensor", 2).edit(
        "return tensor", "return chunks[rank]"
    ),
    *(
        Mutant(name, "not in place", "it gathers into copies of the chunks; fill the tensor that was passed in", 2)
        .edit("tensor.tensor_split", "tensor.clone().tensor_split")
        .edit("return tensor", f"return {returned}")
        for name, returned in (("works on a copy", "torch.cat(chunks)"), ("fills a copy", "tensor"))
    ),
    Mutant("always its own", "mismatch", "receives the chunk that its sender sends", 3, races=True, ends=True).edit(
        "chunks[(rank - step) % n]", "chunks[rank]"
    ),
    Mutant("group ignored", "group ignored", "pass group=group", 3, ends=True).edit(", group=group)", ")"),
    *_CUTS,
)
_SWAP = "outgoing, incoming = incoming, outgoing  # pass on what came, receive into the other buffer"
WRONG_REPAIR = (
    Mutant(
        "never passes on",
        "not passed on",
        "each step sends this rank's own tensor again; pass on what came in the step before",
        3,
        2,
    ).without(_SWAP),
    Mutant(
        "adds the wrong buffer", "adds what went out", "it adds the tensor that it has sent; add what has come", 2, 2
    ).edit(f"tensor += incoming\n{_SWAP}", f"{_SWAP}\ntensor += incoming"),
    Mutant(
        "passes on sums",
        "counted twice",
        "its running sum is sent, so that parts are counted again; pass on the tensor that came",
        3,
    ).edit("Send(outgoing", "Send(tensor"),
    Mutant("ignores the group", "group ignored", "group=group", 3, 7, ends=True).without(", group=group"),
    Mutant(
        "one step too many",
        "own tensor again",
        "n steps bring back this rank's own tensor, which is then in the sum twice; n - 1 are enough",
        2,
    ).edit("range(n - 1)", "range(n)"),
    Mutant("n-2 steps", "part missing", "a tensor never comes; a relay has n - 1 steps", 2).edit(
        "range(n - 1)", "range(n - 2)"
    ),
    Mutant(
        "no copy",
        "no copy",
        "what is sent first is the tensor itself, which later steps then receive into; send a clone",
        3,
        40,
    ).edit("outgoing, incoming = tensor.clone(),", "outgoing, incoming = tensor,"),
    Mutant("one buffer", "raised", "sends and receives in the same memory", 3).edit(_SWAP, "outgoing = incoming"),
    shared.averaged("tensor"),
    Mutant("own missing", "own missing", "this rank's own part is missing in the sum", 2).edit(
        "for _ in", "tensor.zero_()\nfor _ in"
    ),
    Mutant(
        "works on a copy", "not in place", "the sum stands in a new tensor; add to the one that was passed in", 2
    ).edit("outgoing, incoming = tensor.clone(),", "tensor = tensor.clone()\noutgoing, incoming = tensor.clone(),"),
)
