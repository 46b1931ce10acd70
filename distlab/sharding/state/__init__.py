"""The state of a sharded model and its optimizer, in shards or whole. Begin with `parts`."""
