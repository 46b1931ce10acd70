"""Everything that needs a GPU, in one command: `python -m distlab gpu`.

Read `command` first: what the command does, in order. Then:

1. `facts`: what machine this is, and why its GPUs cannot be used where they cannot. `ask` reads it.
2. `job`: what a part is told, what it yields, and the list of parts.
3. `run`: each part in a process of its own, with a time limit. `child` is that process.
4. `results`: gpu.json, kept from run to run. `report`: GPU.md.

`parts` has one module for each subject. `timing` and `models` are what the timed parts share: programs that take turns
on the device's own clock, and the GPT that fills the card. `sheet` finds a GPU's data sheet.
"""
