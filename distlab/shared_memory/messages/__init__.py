"""Sends and receives through shared memory.

Read `letters` (what announces a message), `lanes` (messages from one rank to one other, first in, first out) and
`messages` (all of one rank's, which move on together).
"""
