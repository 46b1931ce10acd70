"""Parameters that differ between ranks are refused by name on every rank: never lost in silence."""

import os
import re

import torch
import torch.distributed as dist

from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import AsyncSaves, save
from distlab.expert_parallel import expert_parallel, mix_experts
from distlab.rng import generator
from distlab.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    parallelize_module,
)

CONFIG = GPTConfig(vocab_size=13, context=8, num_layers=1, num_heads=2, hidden_size=4)


def by_plan():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return parallelize_module(model, {"0": "column", "2": "row"}, example=(torch.ones(2, 4),))


def drifted():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        model[1].bias[3] += 1e-6 * dist.get_rank()
    return model


CUT = {
    "column": (lambda: ColumnParallelLinear.from_full(torch.nn.Linear(4, 8)), "model: weight, model: bias;"),
    "row": (lambda: RowParallelLinear.from_full(torch.nn.Linear(8, 4)), "model: weight;"),
    "column and row": (by_plan, "model: 0.weight, model: 0.bias, model: 2.weight;"),
    "vocabulary": (lambda: VocabularyParallelEmbedding(torch.nn.Embedding(13, 4)), "model: weight;"),
    "experts": (
        lambda: expert_parallel(mix_experts(GPT(CONFIG, generator(0, 0, "weights")), 4, generator(0, 0, "experts"))),
        "model: blocks.0.feed_forward.experts",
    ),
    "equal stages": (
        lambda: [torch.nn.Linear(4, 4) for _ in range(dist.get_world_size())][dist.get_rank()],
        "model: weight, model: bias;",
    ),
    "stages of other shapes": (lambda: torch.nn.Linear(4, 4 + dist.get_rank()), "model: weight, model: bias;"),
    "stages of other names": (
        lambda: torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(1 + dist.get_rank())]),
        "model: 1.weight, model: 1.bias;",
    ),
}
DRIFTED = (drifted, r"parameters differ between ranks \(rank 1 differs from rank 0\): model: 1.bias;")


def ways_to_save(folder, parts):
    """Save each way; return what the refusals say, and what is left."""
    said = []
    with AsyncSaves(folder / "beside") as saves:
        for way in (lambda: save(folder / "at once", 1, parts=parts), lambda: saves.save(1, parts=parts)):
            try:
                way()
            except ValueError as error:
                said.append(str(error))
    dist.barrier()
    return said, [os.listdir(one) for one in folder.iterdir()]


def test_what_differs_between_ranks_is_refused_by_name_on_every_rank_and_nothing_is_left(ranks, tmp_path):
    def run():
        found = {}
        for name, (make, _) in {**CUT, "drifted": DRIFTED}.items():
            torch.manual_seed(0)
            model = make()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            found[name] = ways_to_save(tmp_path / name, {"model": model, "optimizer": optimizer})
            dist.barrier()
        return found

    for found in ranks(2).run(run):
        for name, (_, words) in {**CUT, "drifted": DRIFTED}.items():
            said, left = found[name]
            assert len(said) == 2, name
            for text in said:
                assert re.search(words, text), text
                assert "pass a Hybrid" in text
                assert "\n" not in text
            assert not any(left), name
