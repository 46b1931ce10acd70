"""A part of the GPU command for tests: what it does is its choice. Its process finds it by PYTHONPATH."""

import os
import signal
import subprocess
import sys
import time

from _rows import absolute
from gpu.job import Note, Picture


def findings(job):
    """Do what the choice says; each but the first yields a row before its misfortune."""
    yield absolute(f"{job.choice} on {job.device}", [1.0], bar=2.0, unit="s")
    if job.choice == "rows":
        assert job.seconds > 0
        (job.folder / "picture.png").write_bytes(b"not really")
        yield Note("nothing travels")
        yield Picture("picture.png", "what it shows")
        yield absolute("a bar that is missed", [3.0], bar=2.0, unit="s")
    elif job.choice == "raise":
        raise RuntimeError("the wire is cut")
    elif job.choice == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif job.choice == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
    elif job.choice == "memory" and not job.shrunk:
        import torch  # here: it takes seconds

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
    elif job.choice == "memory in a rank":
        raise RuntimeError("rank 1: OutOfMemoryError: CUDA out of memory")
