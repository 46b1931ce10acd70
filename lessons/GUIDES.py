# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The guide's code on trial
#
# You know PyTorch on one device, and you have read a guide or two about distributed training. They print code. Most of
# it runs; less of it computes what the guide says. On this page each kind of snippet is put on trial, in our own words.
#
# A trial has three steps. **Read** the snippet and **predict** a number: type it into the box, then Enter. **Run** the
# next cell: four real ranks run the snippet as it stands above, and then with one line changed. **Compare**: the
# verdict tells both runs in the same words, with the numbers that were measured.
#
# You may change a snippet and run both cells again: then your version is on trial. A snippet that hangs is stopped
# after 2 seconds, and you read who waits for whom. The page takes about an hour, the ranks take a minute of it.
# [The map of the course](START.ipynb) leads to the lessons that explain each verdict.

# %%
# %load_ext distlab.course.notebook

# %%
import os
import sys

import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distlab.course.grading.lesson import lessons_folder

sys.path.append(str(lessons_folder()))
from guides import ask, close, table, verdict

# %% [markdown]
# ## The training loop
# The first page of every guide: wrap the model, loop over batches, done. What is missing is never an error.

# %% trial="zero_grad"

# %% trial="sampler"

# %% trial="set_epoch"

# %% [markdown]
# ## All verdicts
# The table is made from the runs above.

# %%
table()

# %% [markdown]
# The ranks end with the page.

# %%
close()
