"""Record every call to torch.distributed, and read the record while ranks hang.

Read `recorder`, `intercept` (how calls are seen; `shared`: those of groups in shared memory), `operations` and
`call_site` (what and where), `file` (rows in mapped memory; `header`: what stands before them) and `file_reader`,
`read`, `matching` (which calls meet; `alike`: those that no fingerprint tells apart). `throttle` listens to calls,
too: it slows a link down. `distlab.comm.watch` reads the records while ranks hang.
"""
