"""Write a command so that it runs where its reader stands, and let the commands of a notebook find their programs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

_MODULES = {"distlab": "distlab", "torchrun": "torch.distributed.run"}
_FOLDER = Path(sys.executable).parent


def runnable(command: str) -> str:
    """Return a command such as "distlab check 03" as it runs from this folder.

    It stays as it is where PATH leads to the program, and where the program is neither distlab nor torchrun. Else its
    first word becomes the path of the program next to this Python, such as .venv/bin/distlab. Where there is no such
    program, it becomes this Python with the program's module.
    """
    program, _, rest = command.partition(" ")
    own, found = _FOLDER / program, shutil.which(program)
    if program not in _MODULES or (found and (not own.exists() or Path(found).samefile(own))):
        return command
    if own.exists():
        start = shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))
    else:
        start = f"{shlex.quote(sys.executable)} -m {_MODULES[program]}"
    return f"{start} {rest}".rstrip()


def put_on_path() -> None:
    """Put the folder of this Python first on this process's PATH, for its terminals, kernels and `!` cells."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folders[0] != str(_FOLDER):
        os.environ["PATH"] = os.pathsep.join([str(_FOLDER), *folders])
