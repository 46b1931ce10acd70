"""What makes steps slow: `finding` (what is said), `uneven` (ranks that hold the others up), `exposed` (waits)."""
