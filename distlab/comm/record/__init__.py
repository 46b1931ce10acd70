"""Record every call to torch.distributed, and read the record while ranks hang.

Read `recorder`, `intercept` (how calls are seen; `taps`: those that no operator tells), `operations` (what they are),
`file` (rows in mapped memory), `read`, `matching` (which calls meet; `swapped`: calls that are alike, made in a
different order). `throttle` listens to calls, too: it slows a link down.
`distlab.comm.watch` reads the records while ranks hang.
"""
