"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_LOAD = (
    Mutant("from the start", "values", "from its start", 1)
    .edit("read(saved, start - saved * old, stop - saved * old)", "read(saved, 0, stop - start)")
    .known("reads each saved shard from its start; a piece begins at start - saved * old"),
)

WRONG_SHARE = (
    Mutant("left time counts", "values", "since the last save", 1)
    .edit("trains_s // (interval_s + save_s) * interval_s", "trains_s - trains_s // (interval_s + save_s) * save_s")
    .known("counts the time since the last save as well; it is lost"),
    Mutant("one restart more", "values", "adds a restart", 1)
    .edit("kept_s / sum(uptimes_s)", "kept_s / (sum(uptimes_s) + restart_s)")
    .known("adds a restart to the whole time; the uptimes hold it already"),
)
