"""Asking where the main thread stands must never stop the process."""

import subprocess
import sys

MANY_ASK_AT_ONCE = """
import gc, sys, threading, time
from distlab.comm.record.call_site import main_frame

class Finalized:
    def __init__(self):
        self.itself = self  # a cycle: only a collection frees it

    def __del__(self):
        time.sleep(0)  # lets go of the interpreter lock

def look(depth):
    return look(depth - 1) if depth else main_frame(threading.main_thread().ident)

def work():
    for _ in range(300):
        Finalized()
        look(10)

gc.set_threshold(5)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("no thread stopped", gc.isenabled())
"""


def test_threads_that_ask_while_garbage_is_collected_go_on():
    done = subprocess.run([sys.executable, "-c", MANY_ASK_AT_ONCE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "no thread stopped True\n", done.stderr
