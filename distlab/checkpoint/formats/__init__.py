"""Other programs' layouts, in both directions: torch.distributed.checkpoint's and safetensors.

Read in this order:

1. `dcp` and `torchs`: torch.distributed.checkpoint's layout, by its own code, without running code from a file.
2. `safetensors`: a whole model in files that Hugging Face's programs read.
"""
