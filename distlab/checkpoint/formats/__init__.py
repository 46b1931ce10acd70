"""Other programs' layouts: torch.distributed.checkpoint's, in both directions, and safetensors.

Read in this order:

1. `by_names`: what parts of a run hold, by the names that torch gives it; and back.
2. `dcp_write`: torch.distributed.checkpoint's layout, written by all ranks, each its own shards.
3. `dcp_metadata` and `dcp_read`: the same layout read, whoever wrote it, without running code from it.
4. `safetensors`: a whole model in one file that Hugging Face's programs read.
"""
