"""Right answers to the lesson in lessons/91_trial as a file, and answers that are written as lines of a body."""

import textwrap

GOOD = """
import torch.distributed as dist

def mean(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()

def double(values, *, times=2):
    return [times * value for value in values]
"""
IMPORTS = "import contextlib, ctypes, os, signal, sys, threading, time, torch\nimport torch.distributed as dist\n"


def written(folder, signature, body, helpers=""):
    """Return the function with this signature and body: it stands in a file, of which ranks can read the lines."""
    path = folder / "answers.py"
    text = f"{IMPORTS}\n{helpers}\ndef {signature}:\n{textwrap.indent(body, '    ')}\n"
    path.write_text(text)
    namespace = {"__name__": "answers_of_a_test"}
    exec(compile(text, str(path), "exec"), namespace)
    return namespace[signature.partition("(")[0]]
