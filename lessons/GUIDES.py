# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The guide's code on trial
# You know PyTorch on one device, and have read a guide or two about distributed training. They print code. Here each
# kind of snippet is on trial, in our own words. The page takes an hour. [The map](START.ipynb) leads to the lessons.
#
# **Predict**: read the snippet, and type a number into its box. **Run** the cell below: four real ranks run the snippet
# as it stands, and then a mended one. **Compare**: the verdict has a sentence for each run, with what was measured.
# Change a snippet, run both cells again: yours is on trial. What hangs is stopped, and you read who waits for whom.

# %%
# %load_ext distlab.course.notebook

# %%
import sys
from distlab.course.grading.lesson import lessons_folder

sys.path.insert(0, str(lessons_folder()))
from guides import *  # torch, dist, nn, F and what else the snippets use

# %% [markdown] trials="zero_grad sampler set_epoch spawn none_skipped"
# ## The training loop
# Wrap the model, loop over batches, done. What is missing on the first pages of a guide is seldom an error.

# %% [markdown] trials="every_microbatch lars_norm top_k own_places ten_bits nothing_sent wrong_tensor"
# ## Fewer and smaller messages
# What is sent less often, in fewer bits, or while backward computes. What was really sent is recorded.

# %% [markdown] trials="loss_of_chunks missing_box backward_order"
# ## Pipelines
# Each rank has a stage of the model. F runs a micro-batch forward, B backward.

# %% [markdown] trials="gather_cuts input_gradient bias_times heads_split one_unit"
# ## Layers cut over ranks
# These snippets run, and most of them train: a different model than you think.

# %% [markdown] trials="one_shard not_atomic same_run saved_in_except world_size empty_section"
# ## Saved, resumed, measured
# Here a fault shows weeks later, on the day that matters.

# %% [markdown]
# ## All verdicts
# The table is made from your runs; with it the ranks end. A cell that you run again starts new ones.

# %%
table()
