"""Record every call to torch.distributed, and read the record while ranks hang.

Read `recorder`, `intercept` (how calls are seen), `operations` (what they are), `file` (rows in mapped memory), `read`,
`matching` (which calls meet, and which are made in a different order). `throttle` listens to calls, too: it slows a
link down. `distlab.comm.watch` reads the records while ranks hang.
"""
