"""ZeRO-1 and ZeRO-2: optimizer state and gradients in shards, parameters whole. Begin with `optimizer`."""
