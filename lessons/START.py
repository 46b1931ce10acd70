# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Distributed training, by doing it
#
# You know PyTorch on one device. In this course you make many processes train one model together, and you know at
# each step what is sent, how long it takes and why.
#
# Nothing here needs a GPU, an account or a download. The ranks of every lesson are real processes on this machine,
# and they talk through the same `torch.distributed` that a cluster uses.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The map
# Below is the map: the lessons, what you can do after each, and which exercises you have passed. The
# map is drawn anew each time that you start the lessons. To see how far you are in between, click into the cell and
# press Shift-Enter.

# %%
from distlab.course.notebook import course_map

course_map()

# %% [markdown]
# ## How a lesson goes
# Every idea takes three steps.
#
# 1. **Predict.** You commit to a number before you run anything: how many bytes, how many milliseconds. A wrong guess
#    is where learning starts; nobody else sees it. The cells that answer stay closed until then. You can run them all,
#    and they open when you commit. *Show me* opens them without a number, and none is kept.
# 2. **Run.** Real ranks do it, from the simplest version to the good one.
# 3. **Compare.** The measured time is laid over the predicted one, and the lesson says why they differ.
#
# Then it is your turn: each lesson has functions for you to write and one with a bug for you to find. Under each
# stand three hints, closed until you click them. Run the check below an exercise as often as you like. It runs your
# function on one, two, three and four ranks and tells you what is wrong in words. If you skip an exercise, the rest
# of the lesson goes on with a working version.
#
# Above each function stand its minutes and its difficulty, from 1 to 3. If you are stuck, `hint("03.flat")` shows the
# hints one by one and counts them. After three failed checks and all hints, `solution("03.flat")` shows the solution,
# and the map above then says "solution seen".
#
# Pictures shrink with their window. Where letters are too small to read, hide the list of files (Ctrl-B).
#
# ## Ranks in a cell
# A cell that begins with `%%ranks 4` runs on four processes. They stay alive, so a later cell finds their
# variables. Try it: each rank has its own `rank`, and `dist.all_reduce` adds up the numbers of all four.

# %%
# %%ranks 4
numbers = torch.tensor([rank, rank * rank])
dist.all_reduce(numbers)
numbers.tolist()

# %% [markdown]
# `%%ranks [0,2]` runs a cell on those two alone. `%%ranks --push model` copies `model` from the notebook to the ranks
# first. `%ranks` says what they hold, and `%ranks stop` ends them.

# %%
# %ranks

# %% [markdown]
# ## When something hangs
# Ranks that wait for each other forever are the most common fault in distributed training. You will cause one on
# purpose in the first lesson. When every rank waits and none can go on, a message says so within seconds: who waits
# for whom, in which call, on which line. If a cell runs too long for you, press the stop button (a square), or Esc
# and then I twice: the ranks end and you read where each one stood. Nothing is left running.
#
# ## Where your work is
# You are working in copies, in the folder `work/`. Nothing overwrites them. Passed checks and your predictions
# are written to `work/progress.json`. If you want to begin a lesson afresh, run `distlab lesson reset 03` in a
# terminal: your copy is kept under a different name, with the date.
#
# **Coming back.** A closed notebook keeps your text and your pictures, but not its variables. When you open it again,
# or after a kernel restart, a cell says `NameError: name 'check' is not defined`. Click into the cell where you want to
# go on, and choose *Run > Run All Above Selected Cell*. Then everything above is there again. Cells with measurements
# take some seconds each. Lessons 03 and 08 have a second start in their middle, "Sitting two".
#
# Each lesson also has a lab, a plain script for `torchrun` that runs here and on a cluster: `distlab lab 03`. With
# `distlab lab 03 --impl mine` the lab runs the functions that you wrote. It reads the notebook's file, so save first
# (Ctrl-S).
#
# Commands run as they are written in a terminal of JupyterLab (File > New > Terminal). In a shell of your own, first
# write `. .venv/bin/activate` in the folder of the repository.
#
# ## How near you come
# Each number that you commit to is kept beside what came true. Run the next cell after a lesson or two: which kind of
# quantity do you misjudge, and do you say too little or too much?

# %%
import sys
from distlab.course.grading.lesson import lessons_folder

sys.path.insert(0, str(lessons_folder()))
from predictions import my_predictions

my_predictions()

# %% [markdown]
# ## The code of guides
# Guides on the web print code. Some of it fails, and some computes a different thing than it says. On [a page of its
# own](GUIDES.ipynb) it is put on trial: you predict what each snippet does, and real ranks say what it did. Play it
# after the lessons, or beside them.
#
# ## A page to print
# The next cell writes what you have passed, and when, as a page to print or to hand in. In a terminal,
# `distlab lesson page` does the same.

# %% tags=["remove-output"]
from distlab.course.notebook import progress_page

progress_page()

# %% [markdown]
# Every word of the course stands in the [glossary](GLOSSARY.md), its formulas on a [cheat sheet](CHEATSHEET.md) to
# print.
#
# Open the first lesson in the table above.
