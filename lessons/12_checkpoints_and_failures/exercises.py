"""Exercises of lesson 12; `checks/` defines by its name how each is driven, varied and wrong on purpose."""

from __future__ import annotations

from distlab.grading import Exercise

TITLE = "Checkpoints and failures"
MINUTES = 90
NEEDS = ("01", "03", "07")
AIMS = (
    "Save a sharded checkpoint so that a kill at any moment does no harm, and find out when one is damaged.",
    "Resume a run so that it equals the one that did not fail, bit for bit.",
    "Go on with more or fewer ranks: shards cut anew, no sample twice or lost, batch and rate by a rule.",
    "Go on without a restart when a rank dies: settle who is in the quorum.",
    "Choose how often to save from the time of a save and the time between failures, and check it by trial.",
)

_SAVE = ("import os", "from pathlib import Path", "from typing import Any", "import torch")
_SHARDS = ("import shutil", "from pathlib import Path", "import torch", "import torch.distributed as dist")

EXERCISES = (
    Exercise(
        name="12.save",
        title="whole at every moment",
        minutes=12,
        difficulty=2,
        source="solutions:save",
        imports=(*_SAVE, "from distlab.checkpoint.files import flush_directory"),
        hints=(
            "Only the whole checkpoint may ever have the name `step-40.pt`. So write under a different name.",
            "`os.replace(partial, path)` gives a file a new name, all at once. Before that its bytes must be on the "
            "disk: `file.flush()`, then `os.fsync(file.fileno())`. flush_directory(folder) flushes the name.",
            'Open `folder / f".step-{step}.pt"` with "wb"; torch.save into it; flush; fsync; close; os.replace; '
            "flush_directory.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="12.resume",
        title="all that the rest of a run depends on",
        minutes=10,
        difficulty=2,
        source="solutions:resumable",
        imports=(
            "import copy",
            "from collections.abc import Callable",
            "from typing import Any",
            "import torch",
            "from torch import nn",
            "from torch.optim import Optimizer",
            "from torch.optim.lr_scheduler import LRScheduler",
        ),
        hints=(
            "Model, optimizer and schedule have state_dict() and load_state_dict(). What else does a step read?",
            "Random numbers: `generator.get_state()` and set_state, `torch.get_rng_state()` and set_rng_state. And "
            "the position. A state_dict holds the tensors themselves, which the next step changes.",
            "capture: a dict of three state_dicts, two generators' states and the position, through copy.deepcopy. "
            "restore: load the three, set the two, return the position.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="12.shards",
        title="spot the bug: one checkpoint of all ranks",
        minutes=8,
        difficulty=2,
        source="solutions:save_shards",
        imports=(*_SHARDS, "from torch import Tensor"),
        hints=(
            "It is right on one rank. When does rank 0 give the folder its name, and what do the others do then?",
            "Rank 0 knows that its own file is written. How can it know that of the others?",
            "A dist.barrier() that all ranks pass after they have written, and before rank 0 renames.",
        ),
        broken="rank 0 is done",
    ),
    Exercise(
        name="12.newest",
        title="the newest checkpoint that is whole",
        minutes=10,
        difficulty=2,
        source="solutions:newest_good",
        imports=("import hashlib", "import json", "import re", "from pathlib import Path"),
        hints=(
            'Numbers first: `re.fullmatch(r"step-(\\d+)", path.name)` knows the names; sort by int, largest first.',
            "For each: read the manifest (OSError and ValueError: it is damaged), compare its step, then each file's "
            "`hashlib.sha256((path / file).read_bytes()).hexdigest()`. A file may be missing.",
            "Collect the damaged names of this checkpoint. None: return its path and all names so far. Else go on with "
            "the next one; after the last return None and the names.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="12.load",
        title="a shard from what other ranks saved",
        minutes=8,
        difficulty=2,
        source="solutions:load_shard",
        imports=("from collections.abc import Callable", "from torch import Tensor"),
        hints=(
            "In the row, this shard begins at rank x length, and saved shard s at s x old.",
            "The part that both have begins at the larger of their begins and ends at the smaller end, or at `size`.",
            "shard.zero_(). For each saved shard with a part in common: read it at start - s x old, and put it "
            "at start - rank x length.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="12.quorum",
        title="who is in the quorum",
        minutes=6,
        difficulty=2,
        source="solutions:who_goes_on",
        imports=("from distlab.elastic import Arrival, Quorum",),
        hints=(
            "First: which of those that have asked are alive? Then: is one to wait for, in last.members and alive?",
            "Holders are the living whose line is last.epoch. The step is the largest of theirs.",
            "If a holder is inside that step, and holders are not too few, the members are the holders, else all "
            "that live and have asked. Takers are members that are no holders. At the end, fewer members than "
            "min_replicas wait.",
        ),
        worlds=(1,),
    ),
    Exercise(
        name="12.share",
        title="what part of the time counts",
        minutes=7,
        difficulty=1,
        source="solutions:useful_share",
        hints=(
            "Take one time between two failures. How much of it is training that a checkpoint keeps?",
            "The restart goes first. Then rounds of interval_s + save_s: only whole ones count, so `//`.",
            "Sum max(uptime - restart_s, 0) // (interval_s + save_s) * interval_s; divide by sum(uptimes_s).",
        ),
        worlds=(1,),
    ),
)
