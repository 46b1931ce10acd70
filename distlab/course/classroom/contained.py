"""One submission in a container of bubblewrap (`bwrap`): no network, no other process, and no file but what it needs.

It sees Python, torch, this library and the lessons, all read-only, and one folder to write in. So it cannot reach other
submissions, the grades, keys in a home folder or the network. It can read the lesson's references: checks need them.
"""

from __future__ import annotations

import site
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
SHARED_MEMORY_BYTES = 1 << 30
TRIAL_S = 60.0


def refuse_unless_it_runs() -> None:
    """See whether a container can be made here.

    Raises:
        ValueError: bubblewrap is not there, or the system does not let it make one; one line that says what to do.
    """
    command = [*in_container(Path("/tmp"), ()), sys.executable, "-c", ""]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S)
    except FileNotFoundError:
        fix = "on Debian or Ubuntu, apt install bubblewrap"
        raise ValueError(f"--contained needs bubblewrap (bwrap), which is not installed: {fix}") from None
    if tried.returncode:
        said = " ".join(tried.stderr.split())[-200:] or f"status {tried.returncode}"
        raise ValueError(f"--contained: bubblewrap cannot make a container here ({said}); use a virtual machine")


def in_container(home: Path, readable: Sequence[Path]) -> list[str]:
    """Return what stands before a command to run it in a container.

    Args:
        home: the one folder that it may write.
        readable: files and folders that it may read, beside Python and its packages.
    """
    specs = {name: find_spec(name) for name in ("distlab", "simulator", "torch")}
    places = [str(Path(spec.origin).parents[name == "torch"]) for name, spec in specs.items() if spec and spec.origin]
    found = [*_SYSTEM, sys.prefix, sys.base_prefix, site.getusersitepackages(), *places, *map(str, readable)]
    options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    options += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for path in dict.fromkeys(found):
        options += ["--ro-bind-try", path, path]
    return ["bwrap", *options, "--bind", str(home), str(home), "--remount-ro", "/", "--chdir", str(home)]
