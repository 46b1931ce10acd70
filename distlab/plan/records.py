"""Plan: how a step is laid out over ranks, the noun that the runner, the simulator and the pictures share."""

from __future__ import annotations

from dataclasses import dataclass

from distlab.plan.compression import Compression
from distlab.plan.partition import CUTS
from distlab.plan.require import MOST, chosen, require, require_count
from distlab.plan.schedules.families import SCHEDULES
from distlab.plan.sharding import Precision, Sharding

GRADIENT_SYNCS = ("per_parameter", "flat", "bucketed", "overlapped")
RECOMPUTES = ("none", "selective", "operators", "full")
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "mlp_act", "shared_experts", "moe_act", "moe")
RECOMPUTE_METHODS = ("uniform", "block", "every")
FLOAT8 = ("none", "products", "gathers", "mxfp8", "nvfp4")
CONTEXT_KINDS = ("ring", "all_to_all", "all_gather")
COUNTS = (
    *("data", "pipeline", "tensor", "context", "expert", "num_microbatches", "stages_per_rank", "recompute_layers"),
    *("bucket_bytes", "first_bucket_bytes"),
)


@dataclass(frozen=True)
class Plan:
    """How a step is laid out over the ranks: degrees of parallelism, schedule, and how gradients are combined.

    Attributes:
        data: replicas of the model.
        pipeline: ranks that the model's stages are spread over.
        num_microbatches: micro-batches a replica runs in one step.
        schedule: order in which a rank runs its micro-batches; one of SCHEDULES.
        stages_per_rank: stages of the pipeline on each of its ranks: 2 where they lie as a V, any number in a loop.
        gradient_sync: how replicas average gradients; one of GRADIENT_SYNCS.
        bucket_bytes: capacity of a gradient bucket.
        first_bucket_bytes: capacity of the first bucket, small so that communication starts early.
        compression: what replicas send in place of their gradients, or None.
        sharding: which model states the data-parallel ranks split; stage 0 splits nothing.
        precision: types of numbers; None takes the workload's bytes.
        float8: what blocks do in 8 bits: "none", "products" (of parameters), "gathers" (stage 3 also gathers so),
            "mxfp8" (products with a scale for each 32 numbers) or, in 4 bits, "nvfp4" (a scale for each 16).
        recompute: what backward computes again instead of keeping. "none"; "selective": attention's inner part;
            "operators": in each block all but fused attention and every second matrix product; "full": all but each
            layer's input; or single modules, joined by commas, such as "layernorm,moe_act"; one of MODULES.
        recompute_method: of "full", which blocks keep only an input: "uniform" (the first of each recompute_layers
            blocks, which run again together), "block" (the first recompute_layers of each stage; the others keep all)
            or "every" (one of recompute_layers in the model, the first included; the others keep all).
        recompute_layers: a number of blocks, see recompute_method; 1 with "uniform": each block by itself.
        tensor: ranks that split each layer.
        context: ranks that split each sequence.
        sequence_parallel: whether tensor-parallel ranks split the parts between their layers along the sequence.
        expert: ranks that split the experts of mixture layers. It multiplies the ranks, each with own samples; with
            fold_experts it divides them.
        fold_experts: whether the expert degree divides a stage's data x context x tensor ranks, as Megatron-LM's and
            torchtitan's does. So many neighbours then hold all experts together, and each expert is whole on its rank.
        context_kind: how ranks that split a sequence attend to all of it; one of CONTEXT_KINDS.
        cut: how layers are cut into stages: "time" (nearly equal times) or "blocks" (as many each, as in Megatron-LM).
        offload_activations: whether the host's memory keeps what blocks keep, from their forward to their backward.
        offload_layers: with offload_activations, how many blocks of each stage that is, the first ones; 0: all.
    """

    data: int = 1
    pipeline: int = 1
    num_microbatches: int = 1
    schedule: str = "one_f_one_b"
    gradient_sync: str = "overlapped"
    bucket_bytes: int = 25_000_000
    first_bucket_bytes: int = 1_000_000
    compression: Compression | None = None
    sharding: Sharding = Sharding()
    precision: Precision | None = None
    float8: str = "none"
    recompute: str = "none"
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    stages_per_rank: int = 1
    expert: int = 1
    context_kind: str = "ring"
    cut: str = "time"
    offload_activations: bool = False
    offload_layers: int = 0
    fold_experts: bool = False

    def __post_init__(self) -> None:
        require_count("Plan", **{name: getattr(self, name) for name in COUNTS})
        chosen("Plan: schedule", self.schedule, SCHEDULES)
        SCHEDULES[self.schedule].stages_per_rank(self.stages_per_rank)  # refuses what the schedule has no form for
        chosen("Plan: gradient_sync", self.gradient_sync, GRADIENT_SYNCS)
        other = f"Plan: compression is {self.compression!r}; pass a Compression, such as Compression('top_k'), or None"
        require(self.compression is None or isinstance(self.compression, Compression), other)
        chosen("Plan: float8", self.float8, FLOAT8)
        text = f"parameters that stage 3 gathers, and the stage is {self.sharding.stage}: use 'products', or stage 3"
        require(self.float8 != "gathers" or self.sharding.stage == 3, f"Plan: float8 'gathers' is about {text}")
        for name in (names := str(self.recompute).split(",")):
            chosen("Plan: recompute", name, MODULES if len(names) > 1 else (*RECOMPUTES, *MODULES))
        chosen("Plan: recompute_method", self.recompute_method, RECOMPUTE_METHODS)
        text = f"choose blocks of recompute 'full', and recompute is {self.recompute!r}; leave them out, or use 'full'"
        is_usual = (self.recompute_method, self.recompute_layers) == ("uniform", 1)
        require(self.recompute == "full" or is_usual, f"Plan: recompute_method and recompute_layers {text}")
        chosen("Plan: context_kind", self.context_kind, CONTEXT_KINDS)
        chosen("Plan: cut", self.cut, CUTS)
        many = f"Plan: offload_layers is {self.offload_layers}; pass 0 or more, and more with offload_activations alone"
        require(0 <= self.offload_layers <= self.offload_activations * MOST, many)
        ranks = self.copies * self.tensor
        text = f"Plan: fold_experts lays expert ranks over data x context x tensor = {ranks} ranks of a stage, "
        divides = f"which expert={self.expert} does not divide: use a divisor of {ranks}"
        require(not self.fold_experts or ranks % self.expert == 0, text + divides)
        has_own = self.tensor == 1 or self.sequence_parallel or not self.fold_experts
        require(has_own, f"{text}of which tensor ranks have the same tokens: use sequence_parallel, or tensor=1")
        self.sharding.num_shards(self.copies)  # refuses replicas that do not divide
        whole = "Plan: compression works on whole gradients, which sharding never makes; choose one of the two"
        require(self.compression is None or self.sharding.stage == 0, whole)

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs: data x expert (1 where it is folded) x context x tensor x pipeline."""
        return self.copies * self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Ranks whose gradients of the same parameter are averaged: `num_replicas` x context."""
        return self.num_replicas * self.context

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts, which are fewer than `copies`: data x context where nothing is folded."""
        return self.copies * self.tensor // self.expert if self.fold_experts else self.data * self.context

    @property
    def num_replicas(self) -> int:
        """Sets of ranks that work on samples of their own: data x expert, or data where experts are folded."""
        return self.data if self.fold_experts else self.data * self.expert
