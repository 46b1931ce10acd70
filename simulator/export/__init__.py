"""The same plan in the words of the tools that people run: a DeepSpeed configuration, FSDP2 code.

Read `deepspeed`, then `fsdp2`. What a plan says and a tool cannot do is not left out in silence: `deepspeed_notes`
lists it, and the code carries it as comments.
"""

from simulator.export.deepspeed import deepspeed_config, deepspeed_notes
from simulator.export.fsdp2 import fsdp2_code, fsdp2_notes

__all__ = ["deepspeed_config", "deepspeed_notes", "fsdp2_code", "fsdp2_notes"]
