"""Answers that try to fool the check, to look into it or to end it: what each does, and what must be said of it.

An answer is the body of `answer(tensor)` for the mean over ranks. Where it gets through, it
returns the right mean, which it found out in another way, or zeros.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "lessons" / "03_data_parallel"
SOLUTIONS, NOTEBOOK, STYLES = LESSON / "solutions.py", LESSON / "solution.ipynb", ROOT / "tests/styles/styles_03.py"
HEAD = """
import atexit, faulthandler, gc, hashlib, inspect, os, signal, sys, threading, time, types
import torch
import torch.distributed as dist

def mean(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()

def known(tensor):
    digests = [hashlib.blake2b(f" {rank}".encode(), digest_size=7).digest() for rank in range(2)]
    seeds = [torch.Generator().manual_seed(int.from_bytes(digest, "little")) for digest in digests]
    return sum(torch.randn(100, dtype=torch.float64, generator=seed) for seed in seeds) / 2
"""
OPENED, LOOKED, SAME = "opens a file of the check", "looks into the running check", "all zeros|own tensor"
HANGS, OUTSIDE = "did not finish in|did not return", "reaches the other ranks where no record sees it"

READS = {  # the reference's text: whoever has it has an answer
    "open": f"open({str(SOLUTIONS)!r})",
    "os.open": f"os.open({str(SOLUTIONS)!r}, os.O_RDONLY)",
    "os.open in a folder": f"os.open('solutions.py', os.O_RDONLY, dir_fd=os.open({str(LESSON)!r}, os.O_RDONLY))",
    "chdir": f"os.chdir({str(LESSON)!r}); open('solutions.py')",
    "pathlib": f"import pathlib; pathlib.Path({str(SOLUTIONS)!r}).read_text()",
    "a loader": f"from importlib.machinery import SourceFileLoader as F; F('x', {str(SOLUTIONS)!r}).get_source('x')",
    "linecache": f"import linecache; linecache.getlines({str(SOLUTIONS)!r})",
    "tokenize": f"import tokenize; tokenize.open({str(SOLUTIONS)!r})",
    "fileinput": f"import fileinput; next(fileinput.input({str(SOLUTIONS)!r}))",
    "codecs": f"import codecs; codecs.open({str(SOLUTIONS)!r})",
    "numpy": f"import numpy; numpy.fromfile({str(SOLUTIONS)!r}, dtype='uint8')",
    "np.loadtxt": f"import numpy; numpy.loadtxt({str(SOLUTIONS)!r}, dtype=str)",
    "np.load": f"import numpy; numpy.load({str(SOLUTIONS)!r}, allow_pickle=True)",
    "torch.load": f"torch.load({str(SOLUTIONS)!r})",
    "a notebook": f"open({str(NOTEBOOK)!r})",
    "a lesson's folder": f"os.listdir({str(LESSON)!r})",
    "answers in tests": f"open({str(STYLES)!r})",
}
STARTS = {
    "subprocess": f"import subprocess; subprocess.check_output(['cat', {str(SOLUTIONS)!r}])",
    "os.fork": "os.fork()",
    "torch.multiprocessing": "import torch.multiprocessing as m; m.get_context('fork').Process(target=int).start()",
    "SIGTERM to the parent": "os.kill(os.getppid(), signal.SIGTERM)",
}
LOOKS = {
    "a frame": "sys._getframe(1).f_locals",
    "a frame's function": "list(map(sys._getframe, [1]))[0].f_locals",
    "a generator's frame": "g = (one for one in [1]); g.gi_frame.f_back",
    "an attribute by name": "__import__('operator').attrgetter('gi_frame.f_back')(one for one in [1])",
    "logging's frame": "import logging; logging.currentframe().f_back",
    "locals in a traceback": "import traceback as t; t.StackSummary.extract(t.walk_stack(None), capture_locals=True)",
    "a debugger": "import bdb; bdb.Bdb().set_trace()",
    "a profiler": "sys.setprofile(print)",
    "objects": "gc.get_objects()",
    "referrers": "gc.get_referrers(tensor)",
    "threads' frames": "sys._current_frames()",
}
if sys.version_info >= (3, 12):
    LOOKS["what functions return"] = (
        "m = sys.monitoring; m.use_tool_id(4, 'me'); m.register_callback(4, m.events.PY_RETURN, print)"
    )
TAMPERS = {
    "torch.equal": ("torch.equal = lambda *a: True", "replaced torch.equal"),
    "torch.allclose": ("torch.allclose = lambda *a, **k: True", "replaced torch.allclose"),
    "dist": ("dist.all_reduce = lambda *a, **k: None", "replaced torch.distributed.all_reduce"),
    "results": (
        "import distlab.grading.variation.calls as c; c.copied = lambda v: 0; return mean(tensor)",
        "replaced .*calls.copied",
    ),
    "globals": ("import distlab.grading.sandbox.guard as g; vars(g)['guarded'] = print", "replaced .*guard.guarded"),
    "messages": ("import distlab.comm.launch.messages as m; m.pack = m.pack_call = print", "replaced .*messages.pack"),
    "code": (
        "from distlab.grading.diagnosis import values as v; v.equal.__code__ = known.__code__",
        "replaces what a function",
    ),
    "a name": ("exec(compile('1', torch.__file__, 'exec'))", "gives its code the name of another's file"),
    "a code's name": ("known.__code__.replace(co_filename=os.__file__)", "gives its code the name of another's file"),
    "compiled code": ("__import__('marshal').loads(b'')", "loads code that was compiled before"),
    "a helper": (
        "from distlab.grading.diagnosis.values import seeded; return seeded(0, 100)",
        "calls .*seeded, a function of the",
    ),
    "the reference": (
        "import distlab.grading as g; g.reference_of(g.load_lesson('03').exercise('03.flat'))(1)",
        "reference",
    ),
    "answers": (f"sys.path.insert(0, {str(STYLES.parent)!r}); import styles_03", "this is the reference"),
    "the group": ("dist.destroy_process_group()", "destroyed or replaced the process group"),
    "modules": ("sys.modules.clear()", "could not be used|raised|exited"),
    "environment": ("os.environ.clear()", SAME),
    "pickling": ("import pickle; pickle.dumps = pickle.loads = None", SAME),
}
ENDS = {
    "os._exit(0)": ("os._exit(0)", "exited with status 0"),
    "sys.exit(0)": ("sys.exit(0)", "exited with status 0"),
    "SystemExit": ("raise SystemExit", "exited with status None"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "interrupted"),
    "GeneratorExit": ("raise GeneratorExit", "raised GeneratorExit"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "SIGABRT": ("os.abort()", "killed by SIGABRT"),
    "a null pointer": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    "SIGSTOP": ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
    "all of the group": ("os.killpg(0, 9)", "killed by SIGKILL"),
    "atexit": ("atexit.register(os._exit, 0); sys.exit(3)", "to be run at the program's end"),
    "a thread exits": ("threading.Timer(0.01, os._exit, (0,)).start(); time.sleep(9)", "exited with status 0"),
    "a thread stays": ("threading.Thread(target=time.sleep, args=(99,)).start()", SAME),
    "an alarm exits": ("signal.signal(14, lambda *a: os._exit(0)); signal.setitimer(0, .1); time.sleep(9)", "status 0"),
    "signals ignored": ("[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(99)", HANGS),
    "faulthandler": ("faulthandler.dump_traceback_later(0.1, exit=True); time.sleep(9)", "exited with status 1"),
    "streams closed": ("sys.stdout.close(); sys.stderr.close()", "it changed sys.stdout"),
    "descriptors closed": ("os.close(1); os.close(2)", "it changed sys.stdout"),
    "an endless loop": ("\n    while True: pass", HANGS),
    "a loop in C": ("sum(range(10**12))", HANGS),
    "a loop that catches all": (
        "\n    while True:\n        try: time.sleep(9)\n        except BaseException: 1",
        HANGS,
    ),
    "memory": ("torch.ones(10**10)", "asks for more memory"),
    "recursion": ("f = lambda: f(); f()", "RecursionError"),
    "a flood of words": ("\n    while True: print('passed ' * 1000)", "printed more than"),
    "a destructor exits": ("type('D', (), {'__del__': lambda s: os._exit(0)})()", "exited with status 0"),
    "an error's words exit": (
        "raise type('E', (Exception,), {'__str__': lambda s: os._exit(0)})",
        "exited with status 0",
    ),
    "an error that unpacks": ("raise type('E', (Exception,), {'__reduce__': lambda s: (os._exit, (0,))})", "raised E"),
    "a hook exits": ("sys.excepthook = lambda *a: os._exit(0); raise ValueError('x')", "raised ValueError: x"),
    "a hidden refusal": ("\n    try: sys._getframe(1)\n    except BaseException: pass", SAME),
    "input": ("input()", "EOFError"),
}
CLAIMS = {
    "a verdict printed": ("print('91.mean: passed\\n1 of 1 exercises right')", SAME),
    "a verdict returned": ("return 'passed'", "returned|expected"),
    "equal to all": ("return type('E', (), {'__eq__': lambda s, o: True, '__hash__': None})()", "object of class E"),
    "a number equal to all": (
        "return type('F', (float,), {'__eq__': lambda s, o: True, '__hash__': None})(1)",
        "expected",
    ),
    "unpacks and exits": ("return type('R', (), {'__reduce__': lambda s: (os._exit, (0,))})()", "object of class R"),
    "a tensor's twin": ("return type('T', (torch.Tensor,), {})(torch.zeros(100))", "float32|float64|zeros|expected"),
    "a meta tensor": ("return torch.empty_like(tensor, device='meta')", "meta"),
    "a lazy one": ("return lambda: mean(tensor)", "returned|expected"),
    "by its size": (
        "return mean(tensor) if len(tensor) == 100 else torch.zeros_like(tensor)",
        "call 1, mean.*all zeros",
    ),
    "by its calls": ("mean.n = getattr(mean, 'n', 0) + 1; return mean(tensor) * (mean.n < 3)", "all zeros"),
    "from its seed": (
        "dist.all_reduce(torch.zeros(1)); return known(tensor) if len(tensor) == 100 else mean(tensor)",
        "together sent 8 bytes .* where any right answer sends 1.6 kB",
    ),
}
WAYS = {
    "shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory('seen', create=True, size=9)",
    "/dev/shm": "open('/dev/shm/seen', 'wb')",
    "a file": "open('/tmp/seen', 'w')",
    "a memory map": "import mmap; mmap.mmap(-1, 9)",
    "a socket": "import socket; socket.create_connection(('localhost', 9))",
    "a store": "dist.distributed_c10d._get_default_store().set('a', '1')",
    "another store": "dist.FileStore('/tmp/seen', 2).set('a', '1')",
    "a backend": "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce([tensor])",
}

VALUES = repr(str(ROOT / "distlab" / "grading" / "diagnosis" / "values.py"))
MORE = {
    "a dict that unpacks": (
        "return type('D', (dict,), {'__reduce__': lambda s: (os._exit, (0,))})(a=1)",
        "expected a float64 tensor",
    ),
    "a class that lies": (
        "return type('C', (), {'__class__': property(lambda s: torch.Tensor)})()",
        "object of class C",
    ),
    "a tensor that exits": (
        "return type('T', (torch.Tensor,), {'__torch_function__': classmethod(lambda *a: os._exit(0))})(tensor)",
        SAME,
    ),
    "a deep list": (
        "deep = []\n    for _ in range(10**5): deep = [deep]\n    return deep",
        "returned|expected|cannot be shown",
    ),
    "a long text": ("return 'x' * 10**9", "memory|expected|returned"),
    "a flood from a thread": (
        "threading.Thread(target=lambda: [print('passed' * 999) for _ in iter(int, 1)], daemon=True).start()",
        f"{SAME}|printed more than",
    ),
    "a thousand threads": (
        "[threading.Thread(target=time.sleep, args=(99,), daemon=True).start() for _ in range(1000)]",
        f"{SAME}|can't start new thread",
    ),
    "pipes written to": (
        "\n    for n in range(3, 40):\n        try: os.write(n, b'passed' * 99)\n        except OSError: pass",
        f"cannot be read|was killed|closed|exited|damaged|{HANGS}",
    ),
    "pipes exchanged": (
        "\n    null = os.open('/dev/null', os.O_RDWR)\n    for n in range(3, 40): os.dup2(null, n)",
        "closed a file descriptor|was killed|exited",
    ),
    "streams closed below": ("os.closerange(0, 3)", "it changed sys.stdout"),
    "exec": ("os.execv('/bin/true', ['true'])", "it starts a process"),
    "a bomb": ("\n    while True: os.fork()", "it starts a process"),
    "posix_spawn": ("os.posix_spawn('/bin/true', ['true'], {})", "it starts a process"),
    "a pool": ("import multiprocessing as m; m.Pool(2)", "it starts a process|opens a socket|reaches the other ranks"),
    "raise_signal": ("signal.raise_signal(9)", "killed by SIGKILL"),
    "a signal to a thread": ("signal.pthread_kill(threading.main_thread().ident, 15)", "SIGTERM|asked it to end"),
    "ptrace": ("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)", "calls C's ptrace"),
    "a frame through C": (
        "import ctypes; look = ctypes.pythonapi.PyEval_GetFrame; look.restype = ctypes.py_object; look()",
        "calls C's PyEval_GetFrame",
    ),
    "memory of the parent": ("open(f'/proc/{os.getppid()}/mem', 'rb')", "reads the memory of a process"),
    "memory of its own": ("open('/proc/self/mem', 'r+b')", "reads the memory of a process"),
    "a coroutine's frame": (
        "async def c(): 1\n    one = c(); one.cr_frame.f_back",
        "looks into the running check|all zeros|None",
    ),
    "the judge's file": (f"open({VALUES}, 'a')", "writes to the file"),
    "the judge's file moved": (
        f"os.replace({VALUES}, '/tmp/values.py')",
        "opens a file of the check|writes to the file",
    ),
    "another module in its place": (
        "sys.modules['distlab.grading.diagnosis.values'] = types.ModuleType('values')",
        SAME,
    ),
    "import": ("import builtins; builtins.__import__ = lambda *a, **k: None", "replaced builtins.__import__"),
    "imports of its own": (
        "sys.meta_path.insert(0, type('F', (), {'find_spec': lambda s, *a: os._exit(0)})())",
        "exited with status 0|all zeros|finders",
    ),
    "json and socket": ("import json, socket; json.dumps = json.loads = socket.socket = None", SAME),
    "groups forgotten": ("dist.distributed_c10d._world.pg_map.clear()", "raised|returned|left|zeros|group"),
    "a hook of warnings": (
        "import warnings; warnings.showwarning = lambda *a: os._exit(0); warnings.warn('x')",
        "status 0",
    ),
    "a hook of threads": (
        "threading.excepthook = lambda *a: os._exit(0); threading.Thread(target=lambda: 1 / 0).start(); time.sleep(1)",
        "exited with status 0",
    ),
    "limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))",
        "resource.setrlimit|Too many open",
    ),
    "deep recursion": (
        "sys.setrecursionlimit(10**9)\n    f = lambda n: f(n + 1)\n    f(0)",
        f"SIGSEGV|memory|RecursionError|{HANGS}",
    ),
    "the text of its class": (
        "import distlab.grading as g; inspect.getsource(g.reference_of(g.load_lesson('03').exercise('03.flat')))",
        "opens a file of the check|reference",
    ),
    "time stands still": ("time.time = time.monotonic = time.perf_counter = lambda: 0.0", "replaced time"),
}
