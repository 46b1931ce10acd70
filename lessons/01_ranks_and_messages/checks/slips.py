"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_PING_PONG = (
    Mutant("counts one way", "wrong number of messages", "sends 24 messages", 2).edit(
        "range(rounds)", "range(2 * rounds)"
    ),
)
WRONG_FIT = (
    Mutant("per kilobyte", "not the line", "the line through these points", 1).edit(
        "float(1 / seconds_per_byte)", "float(1 / seconds_per_byte) / 1000"
    ),
)
WRONG_GATHER = (
    Mutant("own is the first", "itself", "put a copy of its own tensor", 3)
    .edit(
        "if sender == root else torch.empty_like(tensor) for sender in range(world_size)",
        "if sender == 0 else torch.empty_like(tensor) for sender in range(world_size)",
    )
    .edit("if sender != root]", "if sender != 0]"),
    Mutant("not waited", "not waited", "keep what irecv returns", 3).without(
        "for message in arriving:\n    message.wait()"
    ),
    Mutant("stacked", "not a list", "return a list of 3 tensors", 3).edit(
        "return tensors", "return torch.stack(tensors)"
    ),
)
WRONG_REPAIR = (
    Mutant("above the threshold", "wrong decision", "return mean < threshold", 2).edit("< threshold", "> threshold"),
    Mutant("the largest loss", "wrong decision", "after step 2 the mean loss is", 2).edit(
        "dist.all_reduce(total)", "dist.all_reduce(total, dist.ReduceOp.MAX)"
    ),
)
