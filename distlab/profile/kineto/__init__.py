"""torch.profiler's traces. Read `event` (the file), `host` (sections and steps), then `spans` (a rank's Trace)."""
