"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_BROADCAST = (
    Mutant("by the last rank", "rank 0 changed", "is now rank 1's", 2).edit("src=0", "src=dist.get_world_size() - 1"),
)
WRONG_AVERAGE = (
    Mutant("maximum", "not a sum", "(ReduceOp.MAX), divided by 2", 2).edit(
        "dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.grad, dist.ReduceOp.MAX)"
    ),
    Mutant("ones for None", "missing gradient", "in this mean it counts as 1, 1", 2).edit("zeros_like", "ones_like"),
    Mutant("mean of those who have", "missing gradient", "the 2 that have it, not by all 3", 3)
    .edit(
        "if parameter.grad is None:",
        "have = torch.tensor(float(parameter.grad is not None))\nif parameter.grad is None:",
    )
    .edit("parameter.grad /= dist.get_world_size()", "dist.all_reduce(have)\nparameter.grad /= have"),
)
WRONG_OVERLAP = (
    Mutant("forgets to finish", "not communicated", "nothing of the others reached it", 2).edit(
        "for bucket in buckets:\n    bucket.finish()", "pass"
    ),
    Mutant("last bucket in the end", "starts after backward", "sends bucket 1 after backward", 2).edit(
        "in enumerate(buckets):", "in enumerate(buckets[:-1]):"
    ),
)
WRONG_SAMPLER = (
    Mutant("same share", "the same for all", "got the same share", 1).edit("[rank::world_size]", "[::world_size]"),
    Mutant("hash of a text", "not repeatable", "when asked for again", 1, races=True).edit(
        'derive_seed(seed, 0, f"epoch {epoch}")', 'hash(f"{seed}, epoch {epoch}") % 2**31'
    ),
    Mutant("batches for samples", "values", "takes position for the number of the batch", 1)
    .edit("divmod(position, num_samples)", "divmod(position * batch_size, num_samples)")
    .known("takes position for the number of the batch: it counts samples"),
)
WRONG_UNEVEN = (
    Mutant("micro-batches for ranks", "weights", "tokens x 2 ranks", 2).edit(
        "dist.get_world_size() / int(total)", "len(num_tokens) / int(total)"
    ),
)
WRONG_REPAIR = (
    Mutant("frozen too", "raised", "doesn't require gradient", 2).edit("if parameter.requires_grad:", "if True:"),
    Mutant("divides twice", "divided twice", "once too often", 2).edit(
        "/= dist.get_world_size()", "/= dist.get_world_size() ** 2"
    ),
)

KNOWN_AVERAGE = (
    Mutant("magnitudes", "values", "counts magnitudes", 1)
    .edit("parameter.grad /=", "parameter.grad.abs_()\nparameter.grad /=")
    .known("counts magnitudes: a gradient keeps its sign"),
)
