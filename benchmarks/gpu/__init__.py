"""Everything that needs a GPU, in one command: `python -m distlab gpu`.

Read `command` first: what the command does, in order. Then `facts` and `ask` (what machine this is, and why its GPUs
cannot be used where they cannot), `job` (what a part is told and what it yields), `run` (each part in a process of its
own, with a time limit), `child` (that process), `results` (gpu.json: what is kept from run to run) and `report`
(GPU.md).

`parts` has one module for each subject. `timing` and `models` are what the timed parts share: programs that take turns
on the device's own clock, and the GPT that fills the card. `sheet` finds a GPU's data sheet.
"""
