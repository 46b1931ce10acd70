"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_RING_ALL_GATHER = (
    Mutant(
        "the other way round", "messages do not fit", "a send and the receive that takes it do not fit", 3, races=True
    ).edit("chunks[(rank - step) % n]", "chunks[(rank + step) % n]"),
    Mutant("group ignored", "group ignored", "pass group=group", 3).edit(", group=group)", ")"),
)
WRONG_TREE_BROADCAST = (
    Mutant("twice the distance", "raised", "send to itself", 4).edit(
        "(place + have + root) % n", "(place + 2 * have + root) % n"
    ),
    Mutant("adds one", "root sends to all", "in a tree of 4 ranks it sends 2", 4).edit("have *= 2", "have += 1"),
)
WRONG_HIERARCHICAL = (
    Mutant("over the wrong group", "wrong group", "a step runs over the wrong group", 4, races=True).edit(
        "chunk, cross", "chunk, local"
    ),
)
WRONG_TIMES = (
    Mutant("a step too many", "latencies", "32 latencies instead of 30", 1).edit(
        "2 * (n - 1) * latency_s", "2 * n * latency_s"
    ),
)
