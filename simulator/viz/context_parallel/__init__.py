"""Ring attention over a causal mask, hop by hop: read `context`."""
