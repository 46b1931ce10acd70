"""The same plan in the words of other tools: their configurations, their flags, and what starts the ranks.

Read `parts` (what tools cannot say is a row each in `limits.csv`), then one tool: `deepspeed`, `fsdp2`,
`torchtitan`, `megatron`, `accelerate`; `launch` (torchrun, Slurm, PyTorchJob, JobSet); `tools` has all by name. What a
tool cannot express is refused in one line; `deepspeed` and `fsdp2` leave it out with a note that says where it goes,
since their users write code of their own. What a tool does otherwise is a note or a comment. Nothing is left out in
silence.

How each is checked (`make test-exports`; versions in the first lines of each file):

    deepspeed, accelerate, torchtitan     read by their own classes
    torchrun                              read by torch's parser
    pytorchjob, jobset                    read by the operators' Python clients
    megatron                              model and parallelism become Megatron-Core's configurations; the names of all
                                          flags are those of arguments.py at one commit, since no package has it
    slurm                                 read by bash; options are in a list of sbatch's
    fsdp2                                 runs on ranks
"""

from simulator.export.deepspeed import deepspeed_config as deepspeed_config, deepspeed_notes as deepspeed_notes
from simulator.export.fsdp2 import fsdp2_code as fsdp2_code
from simulator.export.parts import Exported as Exported, Options as Options
from simulator.export.tools import TOOLS as TOOLS, export as export
