"""Commands that look at this machine, and at what runs on it.

Read `doctor` (what works here), `calibrate` (how fast it is) and `tour` (a small GPT on real ranks). Then `bench` and
`gpu` (claims against their bars), `profile` (where a step's time goes) and `where` (where the ranks of jobs stand).
"""
