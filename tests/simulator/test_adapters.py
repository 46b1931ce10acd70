"""What is trained, and by what: LoRA and QLoRA beside a frozen base, and what optimizers keep.

Trained parameters are those that PEFT prints (huggingface/peft, 2024); bytes of a state those of its own elements.
"""

from dataclasses import replace

import pytest

import simulator as sim
from distlab.plan import PLAIN, Plan, Precision, Sharding, Software
from simulator.memory.memory import KINDS
from simulator.models.adapters import NF4_BYTES

PURE = Precision("bfloat16", master=False, reduce="bfloat16", gradients="bfloat16")
NF4, WIDE = {"lora_rank": 16, "weights": "nf4"}, Software(widens_rest=True)


def model(name="llama-3-8b", **said):
    return sim.ModelDescription(name, sequence_length=2048, **said).workload()


def held(workload, plan):
    return dict(zip(KINDS, sim.memory_of(workload, plan).at_peak_bytes[0].tolist(), strict=True))


@pytest.mark.parametrize(("name", "rank", "modules", "trained"), [
    ("llama-3-8b", 16, "all-linear", 41_943_040), ("llama-2-7b", 8, "query-value", 4_194_304),
    ("llama-2-7b", 64, "all-linear", 159_907_840), ("gpt-2-124m", 8, "query-value", 294_912),
])  # fmt: skip
def test_adapters_alone_are_trained_held_and_sent(name, rank, modules, trained):
    """The base keeps its two bytes and its products for inputs; what is sent and updated is the adapters'."""
    whole, made = model(name), model(name, lora_rank=rank, lora_modules=modules)
    assert made.num_parameters == trained
    weights = sum(layer.weight_gradient.matmul_flops for layer in made.layers)
    assert weights == pytest.approx(2 * 2048 * trained)
    extra = sum(new.forward.flops - old.forward.flops for old, new in zip(whole.layers, made.layers, strict=True))
    assert extra == pytest.approx(weights)
    assert held(made, Plan(precision=PURE))["parameters"] == 2 * (whole.num_parameters + trained)
    for stage in (0, 1):
        one = sim.simulate(made, sim.cluster("dgx-a100"), Plan(2, sharding=Sharding(stage)))
        assert max(one.sent_bytes_by_pipeline_rank) == pytest.approx(2 * trained, rel=0.01)


def test_a_base_is_divided_as_its_weights_are():
    """Tensor and expert ranks divide it; stage 3 shards and gathers it, with nothing to scatter but adapters."""
    made = model(lora_rank=16)
    alone = held(made, Plan(precision=PURE))["parameters"]
    whole = 2 * 65 * 4096 + 2 * 16 * 32 * 7 * 4096  # norms, and the side of each adapter that no rank divides
    split = held(made, Plan(tensor=8, precision=PURE))["parameters"]
    assert split == pytest.approx((alone - whole) / 8 + whole, rel=1e-6)
    shards = Plan(8, precision=PURE, sharding=Sharding(3))
    assert held(made, shards)["parameters"] == pytest.approx(alone / 8, rel=1e-6)
    step = sim.simulate(made, sim.cluster("dgx-a100"), shards)
    sent = {kind: step.trace.is_word("kind", kind) for kind in ("all_gather", "reduce_scatter")}
    gathered, scattered = (step.trace.num_bytes[rows].sum() / 8 for rows in sent.values())  # of 8 ranks
    assert scattered == pytest.approx(2 * made.num_parameters, rel=0.01)
    assert gathered == pytest.approx(2 * alone, rel=0.15)  # forward and backward; the root once
    packed, plans = model(**NF4), [Plan(2, precision=PURE, sharding=Sharding(stage)) for stage in (0, 3)]
    stacks = [[sim.memory_of(packed, plan, software=each).of("parameters") for plan in plans] for each in (PLAIN, WIDE)]
    assert stacks[0][1] == stacks[1][1] == pytest.approx(stacks[0][0] / 2, rel=1e-6), "a base of 4 bits has shards too"
    assert stacks[1][0] - stacks[0][0] == 2 * 4096 * (2 * 128256 + 1)  # embedding, head and its norm
    mixed = sim.ModelDescription("mixtral-8x7b", **NF4).workload()
    experts = 32 * 8 * 3 * 4096 * 14336 * NF4_BYTES
    both = [held(mixed, Plan(expert=ranks))["parameters"] for ranks in (1, 2)]
    assert both[0] - both[1] == pytest.approx(experts / 2, rel=0.02)


def test_bytes_of_4_bits():
    """4.127 bits in the blocks, 16 elsewhere, and one weight unpacked at a time; each pass unpacks all.

    Fits as the paper's abstract says: 65B on one device of 48 GB, recomputing, with 8 bits of state (paged there).
    """
    plain, packed = model(lora_rank=16), model(**NF4)
    blocks = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    saved = [held(each, Plan(precision=PURE))["parameters"] for each in (plain, packed)]
    assert saved[0] - saved[1] == pytest.approx(blocks * (2 - NF4_BYTES), rel=1e-9)
    passes = [sim.memory_of(each, Plan(precision=PURE)).stages[0] for each in (plain, packed)]
    for name in ("forward", "backward"):
        old, new = (getattr(each, name) for each in passes)
        assert (new - old).sum(axis=1).tolist() == [0, *[2 * 4096 * 14336] * 32, 0]
    assert all(
        new.forward.memory_bytes - old.forward.memory_bytes == pytest.approx((2 + NF4_BYTES) * blocks / 32)
        for old, new in zip(plain.layers[1:-1], packed.layers[1:-1], strict=True)
    )
    own = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "feed_forward_size": 22016, "vocab_size": 32000}
    large = sim.ModelDescription(**own, sequence_length=512, lora_rank=64, weights="nf4", optimizer="adamw-8bit")
    assert 38e9 < sim.memory_of(large.workload(), Plan(precision=PURE, recompute="full")).max_bytes < 46e9


@pytest.mark.parametrize(("optimizer", "states", "moved"), [
    ("adamw", 8, 28), ("adamw-16bit", 4, 20), ("adamw-8bit", 2 + 8 / 256, 16), ("sgd", 0, 12), ("sgd-momentum", 4, 20),
    ("sgd-momentum-8bit", 1 + 4 / 256, 14), ("muon", 4.52, 21),
])  # fmt: skip
def test_what_an_optimizer_keeps_and_moves(optimizer, states, moved):
    """States of a width of their own stay so without master weights; others are as wide as what is updated."""
    made, own = model(optimizer=optimizer), states if "bit" in optimizer else states / 2
    kept = [held(made, plan)["optimizer"] / made.num_parameters for plan in (Plan(), Plan(precision=PURE))]
    assert kept == pytest.approx([states, own], rel=1e-3)
    assert made.optimizer.memory_bytes / made.num_parameters == pytest.approx(moved, rel=5e-3)
    assert (made.optimizer.matmul_flops > 0) == (optimizer == "muon")


def test_muon_on_shards_waits_for_the_busiest_owner_or_for_its_parts():
    shapes = [(512, 512)] * 12 + [(7,)]
    owners, everywhere = (sim.whole_update(shapes, 4, by=by) for by in ("owners", "everywhere"))
    each = 5 * (4 * 512**3 + 2 * 512**3)
    assert (owners.flops, everywhere.flops) == (3 * each, 12 * each) == (owners.all_flops / 4, owners.all_flops)
    assert owners.buffers_bytes == (2 * 3 * 2**20, 3 * 2**20)
    assert everywhere.buffers_bytes == (2 * 12 * 2**20,)
    assert sim.whole_update(shapes[:2], 4).flops == each, "more ranks than matrices"
    assert owners.seconds(each, lambda size: size) == sum(owners.buffers_bytes)
    assert owners.seconds(each, lambda size: 0.0) == 3.0
    with pytest.raises(ValueError, match="by is 'all'; choose one of owners, everywhere"):
        sim.whole_update(shapes, 4, by="all")
    own = {"hidden_size": 1024, "num_layers": 2, "num_heads": 8, "vocab_size": 1000, "sequence_length": 128}
    machine, times = sim.cluster("dgx-a100"), {}
    for stage in (0, 1, 3):
        for name in ("muon", "adamw"):
            made = sim.ModelDescription(**own, optimizer=name).workload()
            step = sim.simulate(made, machine, Plan(data=8, sharding=Sharding(stage=stage)))
            times[stage, name] = step.stages[0].optimizer_ns
    assert times[0, "muon"] > times[1, "muon"] > times[1, "adamw"]
    made = sim.ModelDescription(**own, optimizer="muon").workload()
    far = replace(machine, intra_node=sim.link("ethernet-10g"))
    slow = sim.simulate(made, far, Plan(data=8, sharding=Sharding(stage=3))).stages[0].optimizer_ns
    assert slow > 10 * times[3, "muon"], "parts travel, which flat shards of AdamW need not"


TUNED = {"hidden_size": 3072, "num_layers": 28, "num_heads": 24, "num_key_value_heads": 8, "feed_forward_size": 8192}
TUNED |= {"vocab_size": 128256, "ties_embedding": True, "sequence_length": 4096, "microbatch_size": 2}
CHUNKED = {"attention": "flash", "loss_chunks": 8}


@pytest.mark.parametrize(("name", "own", "recompute", "published"), [
    (None, TUNED, "none", 42.9), (None, TUNED, "full", 24.9),
    ("llama-3-8b", {"microbatch_size": 2, "lora_rank": 8}, "full", 16.2),
    ("llama-3-8b", {"microbatch_size": 2, "lora_rank": 8, "weights": "nf4"}, "full", 7.4),
])  # fmt: skip
def test_memory_is_what_torchtune_publishes(name, own, recompute, published):
    """GiB on one device, 16 bits throughout, a loss in 8 parts: README of pytorch/torchtune, 2024-10 and 2025."""
    said = sim.ModelDescription(name, **{"sequence_length": 2048} | own | CHUNKED)
    found = sim.memory_of(said.workload(), Plan(precision=PURE, recompute=recompute)).max_bytes / 2**30
    assert found == pytest.approx(published, rel=0.05)


def test_windows_norms_documents_and_parts_of_a_loss_by_sizes():
    """By sizes as by a configuration; documents and windows leave the pairs that they have, and MFU counts the same."""
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "head_dim": 16}
    config |= {"sliding_window": 32, "max_window_layers": 0, "tie_word_embeddings": False}
    config |= {"use_sliding_window": True, "max_position_embeddings": 256}
    own = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_key_value_heads": 2, "feed_forward_size": 128}
    own |= {"vocab_size": 100, "sequence_length": 256, "attention": "flash"}
    own = sim.ModelDescription(**own, head_norms=True, sliding_window=32)
    assert own.workload().layers == sim.workload_from_config(config, sequence_length=256).layers

    def pairs(**changes):
        made = replace(own, **changes).workload()
        return [layer.forward.attention_flops / (4 * 256 * 64) for layer in made.layers[1:-1]], made.counted_flops

    assert pairs()[0] == [32 * (1 - 32 / 512)] * 4
    assert pairs(full_attention_every=2)[0] == [30, 128, 30, 128]
    assert pairs(sliding_window=None, document_length=64)[0] == [32] * 4
    assert pairs(document_length=64)[0] == [32 * (1 - 32 / 128)] * 4
    assert pairs(document_length=64)[1] == pytest.approx(pairs()[1])
    whole, parts = (held(replace(own, loss_chunks=n).workload(), Plan())["logits"] for n in (1, 4))
    assert parts == whole / 4


def test_what_blocks_keep_goes_to_the_host_and_comes_back():
    """The device keeps two blocks' at a time, the host those of micro-batches in flight; a slow wire is waited for."""
    made = sim.ModelDescription(**TUNED, **CHUNKED, lora_rank=8).workload()
    near, far = Plan(precision=PURE), Plan(precision=PURE, offload_activations=True)
    stages, kind = [sim.memory_of(made, plan).stages[0] for plan in (near, far)], KINDS.index("activations")
    kept = [int(stage.kept[1:-1, kind].sum()) for stage in stages]
    assert (kept[1], sim.memory_of(made, far).host_bytes) == (0, kept[0])
    assert held(made, near)["activations"] - held(made, far)["activations"] == kept[0]
    assert sim.memory_of(made, far).of("buffers") == pytest.approx(kept[0] * 2 / 28, rel=1e-6)
    staged = sim.memory_of(made, replace(far, pipeline=4, num_microbatches=8))
    assert staged.host_bytes_of_ranks[0] == 4 * staged.stages[0].kept_on_host
    ten, parts = replace(far, offload_layers=10), (kept[0] * 10 / 28, kept[0] * 18 / 28)
    machine, some = sim.cluster("dgx-a100"), sim.memory_of(made, ten)
    assert (some.host_bytes, int(some.stages[0].kept[1:-1, kind].sum())) == pytest.approx(parts)
    whole = sum(sim.simulate(made, machine, near).stages[0].forward_ns[1:-1])
    for plan, size in ((far, kept[0]), (ten, parts[0])):  # all copies hide under all blocks
        took = sim.simulate(made, machine, plan).stages[0].forward_ns[1:-1]
        assert sum(took) == pytest.approx(max(size / machine.device.host_link_bytes_per_s * 1e9, whole), abs=28)
    assert len({sim.simulate(made, sim.cluster("gb200-nvl72"), each).steady_s for each in (near, ten)}) == 1
    hidden = [sim.simulate(made, machine, replace(plan, recompute="full")).duration_s for plan in (near, far)]
    assert hidden[0] == hidden[1] < sim.simulate(made, machine, far).duration_s
    with pytest.raises(ValueError, match=r"how much of its host's memory t4 may use; write host_memory_bytes in \[clu"):
        sim.simulate(made, sim.cluster("t4-server"), far)


@pytest.mark.parametrize(("weights", "gib", "tokens_per_s"), [("bfloat16", 8.5, 8210), ("nf4", 4.6, 8035)])
def test_a_fine_tuned_3b_takes_the_memory_and_the_time_that_torchtune_publishes(weights, gib, tokens_per_s):
    """On one A100, compiled, recomputed and offloaded, rank 64: README of pytorch/torchtune, 2025."""
    made = sim.ModelDescription(**TUNED, **CHUNKED, lora_rank=64, weights=weights).workload()
    plan = Plan(precision=PURE, recompute="full", offload_activations=True)
    step = sim.simulate(made, sim.cluster("dgx-a100", 1, stack="compiled-fsdp"), plan)
    assert step.memory.max_bytes / 2**30 == pytest.approx(gib, rel=0.1)
    assert 2 * 4096 / step.steady_s == pytest.approx(tokens_per_s, rel=0.1)
