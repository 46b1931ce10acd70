# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14. Many machines
#
# 85 minutes. Comes after lesson 1 (ranks), lesson 2 (collectives), lesson 10 (meshes and nodes) and lesson 12
# (checkpoints and failures). You need one machine: it plays all of them. Whatever starts here stays on its loopback
# interface (`lo`, address 127.0.0.1), which no other machine can reach.
#
# Afterwards you can
#
# - start ranks on several machines with torchrun, Slurm or Kubernetes, and say what each variable is for;
# - say how the machines meet, and what you see when a machine is missing, late, lost, or looks in a different place;
# - find out which ranks share a machine, and make groups inside and between unequal nodes;
# - look at a cluster before a run, and name the machine that is not like the others.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# Your script runs on one machine with eight GPUs. You rent a second one like it; each costs 24 dollars per hour. You
# start the script on both. Nothing happens: no error, no output, no work on any GPU. After ten minutes both machines
# print a page of traceback. You change something and try again. Ten minutes later you have a different page.
#
# Inside one machine `torchrun` hides how ranks come to know each other. Between machines you have to know who starts
# the ranks, who gives them numbers, and where they meet. With six tries per hour you do not find that out. In this
# lesson you cause each of these failures in two seconds, and see what it looks like.

# %%
from distlab.plan import Mesh
from simulator.viz import draw_mesh

two_machines = Mesh({"node": 2, "local": 8})
show(draw_mesh(two_machines, devices_per_node=8))

# %% [markdown]
# Each row is a machine, a [node](../GLOSSARY.md#node) with eight ranks. Ranks 0 to 7 are on the first one. How does the
# process on the second machine know that it is rank 8, and that rank 0 is somewhere else? Guess first what a failed
# try costs.

# %%
guess_0 = predict("Two machines at 24 dollars an hour wait ten minutes. What does one try cost?", unit="dollars")
guess_0

# %%
print(guess_0.compare(2 * 24 * 10 / 60, how="counted"))

# %% [markdown]
# Two machines at 24 dollars per hour, for a sixth of an hour: eight dollars, and ten minutes of yours. On 64 machines
# it is 256 dollars per try.
#
# ## An agent on each machine
#
# On every machine you run the same command. `torchrun` is an **[agent](../GLOSSARY.md#agent)**: it trains nothing. It
# meets the agents of the other machines, learns which ranks are its own, starts them, and watches them.
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 --rdzv-id job7 train.py
# ```
#
# Read it from left to right: two machines, eight ranks on each. `rdzv` is short for rendezvous, which means a place to
# meet. This place is a *store*, a small dictionary that all agents can reach over the network. `c10d` means that it is
# torch's own store. HEAD stands for the name of the machine that holds it, and 29500 is a port of that machine. Agents
# with the same `--rdzv-id` belong to one job.
#
# Here two agents run on this machine, and each believes that it has a machine of its own. `Agents` starts real
# torchruns; this notebook holds the store in which they meet. First a script that only says what it was told. The two
# machines need not be equal: `a` starts two ranks, `b` one.

# %%
import json
import tempfile
from pathlib import Path

from distlab.elastic import Agents

FOLDER = Path(tempfile.mkdtemp(prefix="lesson14-"))
(FOLDER / "hello.py").write_text("""
import json, os, time
wanted = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_")
told = {name: value for name, value in os.environ.items() if name.startswith(wanted)}
print(json.dumps({"time": time.time(), **told}), flush=True)
""")
agents = Agents()


# %%
def lines_of(agent):
    """Return what the ranks of an agent have printed."""
    return [json.loads(line) for line in agent.text.splitlines() if line.startswith("{")]


for name, ranks in (("a", 2), ("b", 1)):
    agents.start(name, FOLDER / "hello.py", ranks=ranks, flags=["--nnodes", "2"])
both = [agents["a"], agents["b"]]
print("exit statuses:", [agent.wait(60) for agent in both])

# %% tags=["nbval-check-output"]
NAMES = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
for agent in both:
    for told in sorted(lines_of(agent), key=lambda told: told["LOCAL_RANK"]):
        print(f"agent {agent.name}:", ", ".join(f"{name} {told[name]}" for name in NAMES))

# %% [markdown]
# Each agent knew its own number of ranks and nothing else. Together they found out that there are three. RANK and
# GROUP_RANK are left out above, because they depend on which agent has the smaller address: torchrun sorts them. So
# **rank 0 need not be on the machine that you think of as the first**. The variables, one by one:
#
# | variable | what it says | used for |
# |---|---|---|
# | `RANK` | number of this process among all | who sends to whom; who writes the log |
# | `WORLD_SIZE` | number of all processes | the mean over ranks |
# | `LOCAL_RANK` | number on this machine | which GPU: `cuda.set_device(LOCAL_RANK)` |
# | `LOCAL_WORLD_SIZE` | processes on this machine | how to share its cores and its disk |
# | `GROUP_RANK` | number of this machine | which node |
# | `GROUP_WORLD_SIZE` | machines | |
# | `MASTER_ADDR`, `MASTER_PORT` | where the store is in which *ranks* meet | `init_process_group` |
# | `TORCHELASTIC_RUN_ID` | the `--rdzv-id` | names of logs and checkpoints |
# | `TORCHELASTIC_RESTART_COUNT` | how often *this* agent started its ranks again | log: is it the first start? |
#
# Two mistakes come up again and again. `cuda.set_device(RANK)` works on one machine, and asks for GPU 8 on the second.
# And `if RANK == 0: download()` fills the disk of one machine only. You repair that one later.

# %%
print(json.dumps(lines_of(both[0])[0], indent=1))

# %% [markdown]
# ### Without an agent
#
# Many guides start ranks by `torch.multiprocessing.spawn(work, nprocs=8)`: processes of this machine, each told its
# number. Nobody tells them where to meet. And each of them imports the file in which `work` stands. A cell of a
# notebook is no file, nor is what stands behind `python -c`:

# %%
import os
import re
import subprocess
import sys

SPAWNED = """
import torch.distributed as dist, torch.multiprocessing as mp
def work(rank): dist.init_process_group("gloo", rank=rank, world_size=1)
if __name__ == "__main__": mp.spawn(work)
"""
(FOLDER / "spawned.py").write_text(SPAWNED)
bare = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
for name, what in (("a file", [str(FOLDER / "spawned.py")]), ("no file", ["-c", SPAWNED])):
    done = subprocess.run([sys.executable, *what], env=bare, capture_output=True, text=True)
    print(f"{name}:", *[line for line in done.stderr.splitlines() if re.match("(Value|Attribute)Error", line)])

# %% [markdown]
# So set MASTER_ADDR and MASTER_PORT before you spawn, from a file. `Ranks` and `distlab.comm.run` need neither: they
# send the function itself, and hold a store. `deepspeed --num_gpus=8 train.py --deepspeed ds_config.json` needs neither
# too: it sets torchrun's variables for each rank. What stands behind train.py is for train.py to read.
#
# On equal machines the numbers are those of a mesh: here are two machines of four, and where rank 5 stands. Its
# GROUP_RANK is 1, and so is its LOCAL_RANK.

# %%
equal = Mesh({"group": 2, "local": 4})
show(draw_mesh(equal, devices_per_node=4, rank=5))

# %% [markdown]
# ## Slurm
#
# Most clusters have a scheduler that starts processes itself. Slurm calls a process a *task*. It gives tasks numbers
# too, under other names, and no MASTER_ADDR at all. It says which hosts the job has, in a short form:
# `node[01-03,07]`.
#
# ### Exercise: the hosts of a job
#
# Write `hosts_of(node_list)`. On a cluster `scontrol show hostnames` does this; a container often has no `scontrol`.

# %% exercise="14.hosts"

# %% tags=["nbval-check-output"]
for text in ("node[01-03,07]", "gpu[8-11],login"):
    print(text, "is", ", ".join(hosts_of(text)))

# %% [markdown]
# ### Exercise: from Slurm's variables to torch's
#
# `srun python train.py` starts one task per GPU, without torchrun. Write `torch_variables(slurm, hosts)`, so that
# `init_process_group` finds what it needs. The master can be any host, if all tasks name the same one. The port can
# be any free one, if all name the same: so it is made from the number of the job.

# %% exercise="14.slurm"

# %% tags=["nbval-check-output"]
TASK = {"PROCID": "6", "LOCALID": "2", "NTASKS": "7", "NODEID": "1", "TASKS_PER_NODE": "4,3", "JOB_ID": "4711"}
slurm = {f"SLURM_{name}": value for name, value in TASK.items()}
for name, value in torch_variables(slurm, hosts_of("node[08-09]")).items():
    print(f"{name:17} {value}")

# %% [markdown]
# Nodes need not be equal. Here is what your function tells one task of each node, in a larger job:

# %%
from simulator.viz import draw_bars

tasks = [slurm | {"SLURM_TASKS_PER_NODE": "8(x3),4", "SLURM_NODEID": str(node)} for node in range(4)]
told = {f"node {i}": int(torch_variables(one, ["a"])["LOCAL_WORLD_SIZE"]) for i, one in enumerate(tasks)}
words = {"unit": "ranks", "title": "LOCAL_WORLD_SIZE: the last node of a job may have fewer"}
show(draw_bars(told, **words))

# %% [markdown]
# The other way to use Slurm is one task per *node*, which runs torchrun. Then torchrun gives the numbers, and
# restarts ranks that fail. `distlab export --to slurm` writes the script for a plan; `deploy/` in this repository has
# one that is ready. What does it run? A dry run tells: bash runs the script as it is, but `srun` and `scontrol` are
# ours and only print.

# %%
from distlab.plan import Plan
from simulator import ClusterDescription, ModelDescription, PlanFile
from simulator.export import export

sixteen = PlanFile(ModelDescription("gpt-2-124m"), ClusterDescription("dgx-h100"), Plan(data=16))
SHIMS = {"scontrol": "printf 'node08\\nnode09\\n'", "srun": 'echo "on each of $SLURM_NNODES nodes: $*"'}
for name, line in SHIMS.items():
    (FOLDER / name).write_text(f"#!/bin/bash\n{line}\n")
    (FOLDER / name).chmod(0o755)

# %% tags=["nbval-check-output"]
job = {"SLURM_JOB_NODELIST": "node[08-09]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "4711"}
run_with = {"PATH": f"{FOLDER}:{os.environ['PATH']}", **job}
script = export(sixteen, "slurm").text
done = subprocess.run(["bash"], input=script, env=run_with, capture_output=True, text=True, check=True)
print(done.stdout.replace(" --", "\n    --"))

# %% [markdown]
# Read it against the command at the top of this lesson: the same flags. The port is fixed: where two jobs may share a
# node, make it from the job's number, as you did. `--kill-on-bad-exit` ends the whole job when one node's agent fails;
# without it the others wait for the time limit of the job.
#
# ## Kubernetes
#
# Kubernetes starts a *pod* per machine, and two kinds of jobs know that the pods belong together. A **PyTorchJob**
# sets torchrun's flags as variables that begin with `PET_`. A **JobSet** gives each pod a number,
# JOB_COMPLETION_INDEX, and a name that the others can look up. `distlab export --to pytorchjob` and `--to jobset`
# write both. What the second one runs in its pods:

# %% tags=["nbval-check-output"]
jobset = json.loads(export(sixteen, "jobset").text)
pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
command = pods["template"]["spec"]["containers"][0]["command"]
(FOLDER / "torchrun").write_text('#!/bin/bash\necho "torchrun $*"\n')
(FOLDER / "torchrun").chmod(0o755)
for pod in range(pods["completions"]):
    found = {**run_with, "JOB_COMPLETION_INDEX": str(pod)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=True)
    print(f"pod {pod}:", done.stdout.split(" --master-port")[0].replace(" --", "\n    --"))

# %% [markdown]
# Here each pod is told its number (`--node-rank`), so pod 0 has rank 0, and torchrun need not sort the agents. This
# is a *static* rendezvous. It is simple, and a pod that comes back must come back under the same number.
#
# | what | torchrun | Slurm | PyTorchJob | JobSet | DeepSpeed | Horovod |
# |---|---|---|---|---|---|---|
# | machines | `--nnodes` | `--nodes` | `replicas` of Worker, and 1 | `completions` | `--hostfile` | `-H` |
# | ranks on each | `--nproc-per-node` | `--ntasks-per-node` | `nprocPerNode` | in the command | slots | slots |
# | where to meet | `--rdzv-endpoint` | first host | the Master's name | pod 0's name | `--master_addr` | automatic |
# | its number | found, or `--node-rank` | SLURM_NODEID | `PET_NODE_RANK` | JOB_COMPLETION_INDEX | by host | by host |
# | restarts | `--max-restarts` | `--requeue` | `backoffLimit` | `maxRestarts` | elastic agent | elastic driver |

# %% [markdown]
# ## Who shares a machine?
#
# Ranks of one machine talk through memory or NVLink, ranks of two machines through a cable. Collectives in two levels
# (lesson 2) need groups: *inside*, the ranks of one machine; *between*, the ranks at one place of all machines. So
# far all machines were equal and filled in order. A scheduler may hand out 4 + 3 places, or deal tasks out in turn
# (`--distribution=cyclic`): then ranks 0 and 1 are on different machines. One thing is always right: the name of the
# host. Each rank can send it to all others.
#
# ### Exercise: groups inside and between nodes
#
# Write `places(hosts)`, where rank r runs on `hosts[r]`. The first group between nodes has the **leaders**, one rank of
# each node.

# %% exercise="14.places"

# %% tags=["nbval-check-output"]
for hosts in (["a", "a", "a", "b", "b"], ["a", "b", "a", "b"]):
    inside, between = places(hosts)
    print(f"{' '.join(hosts):10} inside {inside}, between {between}")

# %% [markdown]
# How much is it worth to know the places? Take two nodes of two ranks on this machine, with memory inside and 40
# MB/s, 200 us between, as in lesson 2. First comes a flat ring through all four, which ignores the nodes. Then the
# two levels, with the groups that your function found. Commit to a number.

# %%
guess_1 = predict("Two levels over the flat ring on 2 MiB: what part of the time?", unit="x")
guess_1

# %%
import time

from distlab.collectives import hierarchical_all_reduce, ring_all_reduce
from distlab.comm import Nodes


def my_groups():
    """Make the groups of `places`, every rank all of them, and return this rank's inside and between."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, "node" + os.environ["GROUP_RANK"])
    made = [{tuple(group): dist.new_group(group) for group in kind} for kind in places(hosts)]
    return [next(kind[group] for group in kind if dist.get_rank() in group) for kind in made]


# %%
def time_levels(length=524_288, turns=5):
    inside, between = my_groups()
    calls = (ring_all_reduce, lambda tensor: hierarchical_all_reduce(tensor, inside, between))
    times = [[], []]
    for turn in range(2 * turns):
        tensor = torch.ones(length)
        dist.barrier()
        begin = time.perf_counter()
        calls[turn % 2](tensor)
        times[turn % 2].append(time.perf_counter() - begin)
    return [min(own) for own in times]


# %%
with Ranks(4, nodes=Nodes(2, between="40MB/s,200us"), record=False) as ranks:
    flat_s, two_s = (max(own) for own in zip(*ranks.run(time_levels), strict=True))
print(guess_1.compare(two_s / flat_s))
bars = {"a flat ring": flat_s * 1e3, "two levels": two_s * 1e3}
words = {"unit": "ms", "title": "Two levels: no rank's slow wire carries more than a third of what it did"}
show(draw_bars(bars, **words))

# %% [markdown]
# A rank of the flat ring sends 1.5 times the tensor: $2(n-1)/n$ with $n = 4$ (lesson 2). Where its neighbour is on the
# other node, all of that goes over the slow wire. With two levels each rank first gets half of its node's sum, through
# memory. Only this half goes between nodes. An all-reduce of two ranks sends what it is given once: so it is half a
# tensor, a third of 1.5. On a quiet machine the time is a little more than a third, because the steps in memory take
# their part.
#
# That counts a rank's own wire. In all, two thirds of the bytes cross: two ranks send 1.5 tensors each in the flat
# ring, four send half a tensor each in two levels. If all ranks of a node share one wire, the gain is 1.5 times, not 3.
#
# ## How agents meet
#
# Back to the agents. None of them knows how many ranks the others start, or who else has come. They know one address.
# There stands the *store*, the dictionary that all can reach: `set` a key, `get` one (which waits until it is there),
# `add` to a number. That is all, and it is enough. Finding each other like this is called a
# **[rendezvous](../GLOSSARY.md#rendezvous)**.
#
# ### Exercise: a rendezvous
#
# Write `meet(store, attempt, num_agents, local_ranks, address)`. Mind the two ends of an agent's life. One that comes
# when the job is full must not get numbers. And when a rank has failed, all meet *again in the same store*, where the
# addresses of the dead still stand: `attempt` tells the old from the new. In torch, some restarts read a dead address
# and hang ([issue 135712](https://github.com/pytorch/pytorch/issues/135712)).

# %% exercise="14.rendezvous"

# %% [markdown]
# Four processes as four agents, which start 3, 1, 4 and 1 ranks. Then host0 is gone, and the others meet again. Their
# store is the one in which the four processes met themselves (`_get_default_store`).


# %%
def as_agents(sizes=(3, 1, 4, 1)):
    me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    first = meet(store, 0, 4, sizes[me], f"host{me}")
    again = meet(store, 1, 3, sizes[me], f"host{me}") if me else None
    return first, again


# %%
with Ranks(4, record=False) as ranks:
    found = ranks.run(as_agents)
for me, (first, again) in enumerate(found):
    number, first_rank, world_size, master = again or first
    print(f"host{me}: agent {first[0]}, first rank {first[1]} of {first[2]}", end="; ")
    print(f"then agent {number}, first rank {first_rank} of {world_size}, master {master}" if again else "then gone")

# %% [markdown]
# Run the cell again: the numbers change, since the first to come is agent 0. A rank's number is not tied to a machine,
# not even within one job. What is tied to a machine, such as its part of the data, belongs under the machine's name.
#
# ## One is missing, late, or somewhere else
#
# Now the failures of the question, with real agents, and a limit of 3 seconds instead of ten minutes (`--rdzv-conf
# join_timeout=3`). `is_host=0` tells an agent that a different process holds the store: here the notebook. Each job has
# its own `--rdzv-id`, so they do not meet each other.
#
# 1. *missing*: two machines are wanted, and one comes;
# 2. *elsewhere*: a machine looks at a port where no store is.
#
# And one that works: *late*. The agent `early` waits for `late`, which comes a second after it.

# %%
import socket

with socket.socket() as closed:
    closed.bind(("127.0.0.1", 0))
    free_port = closed.getsockname()[1]  # nobody listens here
SHORT = "is_host=0,join_timeout=3,read_timeout=3"
begin = time.time()
for name, more in {"missing": [], "elsewhere": ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]}.items():
    flags = ["--nnodes", "2", "--rdzv-id", name, "--rdzv-conf", SHORT, *more]
    agents.start(name, FOLDER / "hello.py", flags=flags)
agents.start("early", FOLDER / "hello.py", flags=["--nnodes", "2", "--rdzv-id", "pair"])
time.sleep(1)
came = time.time()
agents.start("late", FOLDER / "hello.py", flags=["--nnodes", "2", "--rdzv-id", "pair"])
ended = {name: (agents[name].wait(120), time.time()) for name in ("missing", "elsewhere", "early", "late")}

# %%
for name, (status, _) in ended.items():
    errors = re.findall(r"Rendezvous\w+Error", agents[name].text)
    print(f"{name:10} exit status {status}: {errors[-1] if errors else 'its ranks ran'}")

# %% [markdown]
# Two errors, two meanings. A **RendezvousTimeoutError** says: I reached the store, and too few came. A
# **RendezvousConnectionError** says: I did not reach the store at all. Neither says *who* is missing, or where it went.
# And neither comes at once: torch tries a port on which nobody listens again and again, until its limit.

# %%
took = {}
for name, (_, end) in ended.items():
    started = [told["time"] for told in lines_of(agents[name])]
    what = f"{name}: until its ranks start" if started else f"{name}: until it gives up"
    took[what] = min(started, default=end) - (came if name == "late" else begin)
words = {"unit": "s", "title": "Late is not lost: early and late start together"}
show(draw_bars(took, subtitle="the start of Python included", **words))

# %% [markdown]
# A table to keep. The first column is what you see, and you see it on the machines that did nothing wrong.
#
# | what one sees | what it often is | how to find out |
# |---|---|---|
# | RendezvousTimeoutError on all | one never started; `--nnodes` too large; ids differ | count them; compare ids |
# | RendezvousConnectionError, a minute or two later | wrong port; no store there yet | `nc -vz HEAD 29500`: "refused" |
# | the same | a firewall drops packets; wrong address | `nc -vz HEAD 29500` from each node: silence |
# | ranks start, `init_process_group` hangs | ranks use other ports than agents: closed | interfaces, below |
# | job starts with too few ranks | `--nnodes 1:4` lets it begin with one | print the world size |
# | `address already in use` | the job before still runs, or shares the node | a port made from the job's number |
#
# ## Lost, and found
#
# Two machines train, and one loses its power. What do the others see? The ranks of `a` wait in an all-reduce. Their
# sockets close, so they fail, and agent `a` starts them again, as often as `--max-restarts` says. But first it waits in
# the rendezvous for a second machine. When `b` is back, both start from the newest checkpoint (lesson 12).
#
# `train.py` in this lesson's folder trains a small GPT in this way, by lesson 12's `ElasticRun`. It writes down each
# update. The cell kills agent `b` with its rank, as soon as there are 6 updates, and starts it again a second later.
# (`-m distlab.comm.standby` keeps a process at hand that has torch loaded: without it each start takes three seconds
# more.)

# %%
from distlab.grading import load_lesson

TRAIN = load_lesson("14").folder / "train.py"
ALIVE = "is_host=0,keep_alive_interval=1"  # how often an agent says that it lives; 3 times unheard is dead


def start_training(name):
    flags = ["--nnodes", "2", "--max-restarts", "3", "--rdzv-id", "gpt", "--rdzv-conf", ALIVE]
    return agents.start(name, TRAIN, [str(FOLDER), "16", "0.05"], flags=[*flags, "-m", "distlab.comm.standby"])


def updates():
    path = FOLDER / "updates.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# %%
a, b, asked = start_training("a"), start_training("b"), time.time()
while len(updates()) < 6 and a.process.poll() is None:
    time.sleep(0.02)
b.kill()
killed = time.time()
time.sleep(1)
b, back = start_training("b"), time.time()
print("statuses", a.wait(120), b.wait(120), "after", round(time.time() - killed, 1), "s")

# %%
made = updates()
starts = list(dict.fromkeys(one["process"] for one in made))
again = [one for one in made if one["process"] == starts[-1]]
print("updates of the first start:", [one["update"] for one in made if one["process"] == starts[0]])
print("updates of the second one: ", [one["update"] for one in again])
print("made twice:", len(made) - len({one["update"] for one in made}))
waited = {"killed until back": back - killed, "back until the next update": again[0]["time"] - back}
words = {"unit": "s", "title": "One machine was away, and all of them waited"}
show(draw_bars(waited, **words))

# %% [markdown]
# You did nothing on machine `a`: its agent did it all. What `a` had made since the newest checkpoint was made twice.
#
# Who notices that `b` is gone? Agent `a` looks at its *own* ranks only. If they had not been in a collective, they
# would have gone on alone. And the rendezvous still counts the dead agent until it has been silent for three times
# `keep_alive_interval`, 15 seconds if nobody changes it. Only then is there room for the one that comes back.
#
# One more trap. `TORCHELASTIC_RESTART_COUNT` is now 1 on `a` and 0 on `b`: each agent counts its own. If you put this
# number into the keys of the store, to keep dead addresses apart, the two machines look under different keys. Then
# their ranks wait for each other until the timeout. (This library did, until this lesson was written.) What separates
# attempts must be the same on all machines: in your `meet` the caller says it. `Agents` lets rank 0 open a new store
# at each start.
#
# ## What a network looks like from inside
#
# So far everything went over loopback. A real machine has several interfaces: `lo`, one or two Ethernet cards,
# InfiniBand, and those that docker made. Linux can give processes a network of their own, a *network namespace*. Two
# of them with a cable between are two small machines. In the next cell everything happens inside a private namespace,
# which vanishes with the process. Where a system does not allow it, the cell says so. You need not read the shell's
# commands: they make networks `a` and `b`, give them the addresses 10.0.0.1 and 10.0.0.2, and let `b` call `a` in
# five ways.

# %%
WIRES = """
mount -t tmpfs none /run && ip netns add a && ip netns add b
ip link add eth0 netns a type veth peer name eth0 netns b
for n in a b; do ip -n $n link set lo up; ip -n $n link set eth0 up; done
ip -n a addr add 10.0.0.1/24 dev eth0; ip -n b addr add 10.0.0.2/24 dev eth0
"""
LISTEN = "import socket, time; s = socket.create_server(('10.0.0.1', 29500)); time.sleep(9)"
CALL = """
import socket, sys, time
begin = time.time()
try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5).close(); said = "connected"
except OSError as error: said = f"{type(error).__name__}: {error.strerror or error}"
print(f"{sys.argv[3]:24} {said} after {time.time() - begin:.1f} s", flush=True)
"""

# %%
(FOLDER / "call.py").write_text(CALL)
PY, FROM_B = sys.executable, f"ip netns exec b {sys.executable} {FOLDER / 'call.py'}"
script = f"""set -e
{WIRES}
ip netns exec a {PY} -c "{LISTEN}" & sleep 0.5
{FROM_B} 10.0.0.1 29500 "the store"; {FROM_B} 10.0.0.1 29501 "a different port"
{FROM_B} 127.0.0.1 29500 "MASTER_ADDR=localhost"
ip -n b route add unreachable 10.0.0.1; {FROM_B} 10.0.0.1 29500 "no route"
ip -n b route del unreachable 10.0.0.1; ip -n a link set eth0 down; {FROM_B} 10.0.0.1 29500 "cable out"
kill %1"""

# %%
own = ["unshare", "--user", "--map-root-user", "--net", "--mount", "bash", "-c", script]
try:
    done = subprocess.run(own, capture_output=True, text=True, timeout=60)
    print(done.stdout or f"no network namespaces here: {done.stderr.strip().splitlines()[-1]}")
except FileNotFoundError:
    done = subprocess.CompletedProcess(own, 1, "", "")
    print("no network namespaces here: there is no unshare (Linux has it)")

# %%
tried = {line[:24].strip(): float(line.split()[-2]) for line in done.stdout.splitlines() if "after" in line}
tried["torch, where nothing listens"] = took["elsewhere: until it gives up"]  # from above
words = {"unit": "s", "title": "Only silence takes time; torch makes silence of every refusal"}
show(draw_bars(tried, subtitle="limits: 1.5 s for a call; for torch 3 s, and Python's start", **words))

# %% [markdown]
# Four ways to fail, and three answers. **Refused at once**: the machine is there, and nothing
# listens on this port (or on *this* machine's localhost: the classic of `MASTER_ADDR=localhost`). **No route, at
# once**: this machine has no way to that address. **Silence until the limit**: packets vanish, by a firewall or a
# cable. torch tries again in all of these cases, until its limit: a minute or two for the store. For a collective it
# is ten minutes (nccl) or thirty (gloo). So in torch's messages they look alike, and `nc -vz HEAD 29500` tells them
# apart in a second.
#
# ### The wrong interface
#
# Agents and the store go to the address that you name. Then gloo and nccl open connections of their own, on an
# interface that *they* choose: mostly that of the host's name. If that is docker's, ranks call each other under
# addresses that lead nowhere. `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name the right one. With a name that does
# not exist, gloo at least says so:


# %%
def with_interface(name):
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        dist.new_group([0, 1], backend="gloo")
        return "a group"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0].rpartition('] ')[2]}"


with Ranks(2, record=False) as ranks:
    print("lo:  ", ranks.run(with_interface, "lo")[0])
    print("eth7:", ranks.run(with_interface, "eth7")[0])

# %% [markdown]
# | setting | what it does | when |
# |---|---|---|
# | `GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME` | which interface; nccl: `^lo` leaves one out | several of them |
# | `NCCL_DEBUG=INFO` | says which interface and which path nccl took | always, in the first run on a new cluster |
# | `NCCL_IB_HCA=mlx5_0,mlx5_1` | which InfiniBand cards | storage has a card of its own |
# | `NCCL_IB_DISABLE=1` | sockets instead of InfiniBand | to find out whether InfiniBand is the fault |
# | `NCCL_P2P_DISABLE=1` | no direct copies between GPUs of a machine | it hangs inside *one* machine |
#
# A setting that helped to find a fault does not belong into the job for good: `NCCL_IB_DISABLE=1` left behind costs
# nine tenths of the bandwidth, and nothing says so.
#
# ## Files that are on one machine
#
# Rank 0 downloads the data, then a barrier, then all read. On one machine that is right. On two machines rank 0's
# `/tmp` is not the other's. And if all ranks write to a *shared* file system, eight of them write one file at a time,
# and tear it. Once per node, and everyone waits:
#
# ### Exercise: spot the bug
#
# The function below was right for years, on one machine. Run the check, read what it says, repair it.

# %% exercise="14.repair"

# %% [markdown]
# A shared file system has traps of its own. A file that rank 0 has just written may be invisible on a different machine
# for seconds: NFS believes what it knows of a folder for 30 to 60 s, and of a file for 3 to 60. So wait with a barrier,
# then open it by name, and do not list the folder. On one machine `os.replace` is atomic. For other machines it is
# atomic on most file systems, not on all. And a thousand ranks that import torch at once all read its libraries, up to
# 3 GB, and look for thousands of files: it takes a minute or more until rank 0 prints its first word.
#
# ## Whose clock?
#
# To lay the traces of two machines over each other (lesson 13), you need to know how far their clocks are apart. NTP
# keeps them within some milliseconds; a collective takes less. So measure it: send a message, let the other one
# answer with its time, and note when the answer is here.
#
# ### Exercise: how far two clocks are apart
#
# Write `clock_offset(rounds)`. This is Cristian's method (1989). Say also how wrong it can be.

# %% exercise="14.clocks"

# %% [markdown]
# Two ranks, of which rank 1's clock runs 0.8 s ahead (it adds that to its time). Both note when they come out of twenty
# barriers. Rank 0 plays ping-pong with rank 1 to find out how far they are apart.


# %%
def on_my_clock():
    skew = 0.8 * dist.get_rank()

    def clock():
        return time.monotonic() + skew

    marks, rounds, number = [], [], torch.zeros(1, dtype=torch.float64)
    for _ in range(20):
        dist.barrier()
        marks.append(clock())
        time.sleep(0.05)
    return marks, ping_pong(clock, rounds, number)


# %%
def ping_pong(clock, rounds, number, times=20):
    for _ in range(times):
        if dist.get_rank() == 0:
            sent = clock()
            dist.send(number, 1)
            dist.recv(number, 1)
            rounds.append((sent, float(number), clock()))
        else:
            dist.recv(number, 0)
            dist.send(torch.full_like(number, clock()), 0)
    return rounds


# %%
from distlab.trace import Span, Trace
from simulator.viz import draw_timeline

with Ranks(2, record=False) as ranks:
    (marks_0, rounds), (marks_1, _) = ranks.run(on_my_clock)
offset, error = clock_offset(rounds)
print(f"rank 1's clock needs {offset:+.4f} s; that is off by at most {error * 1e6:.0f} us")


def steps_of(rank, clock, marks):
    ns = [int(1e9 * mark) for mark in marks]
    pairs = zip(ns, ns[1:], strict=False)
    return [Span(rank, clock, f"step {i}", "step", *pair) for i, pair in enumerate(pairs)]


# %%
aligned = [mark + offset for mark in marks_1]
three = steps_of(0, "clock", marks_0) + steps_of(1, "own clock", marks_1) + steps_of(1, "corrected", aligned)
title = "By its own clock rank 1 is late; corrected, both leave each barrier at one time"
words = f"{title}. Rank 1's own clock is ahead by {-offset:.1f} s, which is {-offset / 0.05:.0f} steps."
show(draw_timeline(Trace.from_spans(three), title=title).figure, words)

# %% [markdown]
# Uncorrected, rank 1 seems to be 16 steps<!--out--> late, and a search for stragglers finds one that does not exist.
# `clock_offsets_ns` of the library does the same at the start of every trace.
#
# ## Preflight
#
# Most of the faults of this lesson can be found in a second, *before* the run. Each rank says what it knows: host,
# versions, device, interface, free shared memory (`/dev/shm`: loaders and nccl need it, a container gives 64 MB).
# Then all compare. On 64 machines "something differs" does not help you. So name the hosts.
#
# ### Exercise: preflight
#
# Write `preflight(facts)`: every rank gives its own facts, and every rank gets what differs, by value and host.

# %% exercise="14.preflight"

# %%
import platform
import shutil


def my_facts():
    node = os.environ["GROUP_RANK"]
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    facts = {"host": f"node{node}", "torch": torch.__version__, "python": platform.python_version()}
    facts["shm"] = "64 MB or more" if free >= 1 << 26 else "too small"
    facts["wire"] = "eth0" if node == "0" else "docker0"  # node 1 is made up to be wrong
    return preflight(facts)


with Ranks(4, nodes=2, record=False) as ranks:
    for name, values in ranks.run(my_facts)[0].items():
        print(f"{name}: " + "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in sorted(values.items())))

# %% [markdown]
# ## Lab
#
# Two agents train a small GPT, one is killed and comes back, and the final weights are those of a run without the loss,
# bit for bit. Before that your functions work on the ranks of the lab itself:
#
# ```
# distlab lab 14 --ranks 4 --impl reference
# distlab lab 14 --ranks 4 --impl mine --away-s 5
# distlab lab 14 --ranks 4 --nodes 2 --between 40MB/s,200us
# ```
#
# On your own cluster, one of the files in `deploy/` starts it; by hand, on each machine:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 lessons/14_many_machines/lab.py
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. Agents start 8, 8, 4 and 8 ranks and are numbered in this order. Which ranks does agent 2 have? What is the world
#    size?
# 2. Ten answers of a clock came back after 400 us or more, and one after 90 us. How well do you know the offset?
# 3. A job of 512 ranks on nodes of 8: how many groups inside nodes, and how many between?
# 4. With `keep_alive_interval=5` and three attempts, how long does a dead agent count as there?
# 5. A job waits for the limit of 10 minutes on 32 nodes of 24 dollars an hour. What did that cost?

# %% tags=["nbval-check-output"]
sizes = [8, 8, 4, 8]
first = sum(sizes[:2])
print(f"1. ranks {first} to {first + sizes[2] - 1} of {sum(sizes)}")
print(f"2. to {90 / 2:.0f} us, from the one quick round")
inside, between = places([f"node{rank // 8}" for rank in range(512)])
print(f"3. {len(inside)} and {len(between)}")
print(f"4. {5 * 3} s")
print(f"5. {32 * 24 * 10 / 60:.0f} dollars")

# %%
agents.close()
shutil.rmtree(FOLDER, ignore_errors=True)

# %% [markdown]
# ## What to read next
#
# - torch's documentation of `torchrun` and of `torch.distributed.elastic.rendezvous`: all flags, and what an agent
#   does.
# - NVIDIA's *NCCL User Guide*, "Environment Variables" and "Troubleshooting".
# - Stas Bekman, *Machine Learning Engineering*, the chapters on the network and on debugging: how others found faults
#   of this kind.
#
# **Next: lesson 15.** You can start ranks anywhere. Lesson 15 asks what to start: which strategy, on which cluster, for
# which budget.
#
# ## Sources
#
# - Cristian 1989, *Probabilistic clock synchronization*, Distributed Computing 3: the offset from the quickest round
#   trip.
# - Documentation and source of torch 2.13 (`torchrun`, dynamic rendezvous, the keep-alive of agents), Slurm 23.11
#   (`sbatch`, `srun`, `scontrol`), Kubeflow's Training Operator 1.9, JobSet v1alpha2, the NCCL User Guide, `nfs(5)`
#   (how long listings are kept), `network_namespaces(7)`. Read 2026-11.
# - pytorch issues 135712 and 167288: restarts that read dead addresses from the store.
# - In this repository: `distlab/elastic/agents.py`, `distlab/comm/rendezvous.py`, `distlab/comm/clocks.py`,
#   `simulator/export/launch.py`.
