"""Start ranks as real processes, talk to them, and leave nothing behind.

Read `ranks` (`run`, `Ranks`, `run_script`), `pool` (one set of processes), `worker` (what runs inside a rank), then
`forkserver` with `fork_client` and `messages`. `failures` puts the cause first.
"""
