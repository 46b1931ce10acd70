"""What all ranks agree on before an action runs.

Read `shapes` (values of any nesting, taken apart into tensors; a batch, cut into micro-batches) and `negotiate` (is the
schedule valid, are the stages here, do they fit?).
"""
