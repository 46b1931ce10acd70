"""Where an answer that nobody foresaw is wrong: the one place of its own text that makes all drawn calls right.

Read `mend` first, which tries the versions of an answer; `places` walks over its text and yields them.
"""
