"""Messages and collectives: rings step by step, races between algorithms, fits of links.

Read `ring_record` (what a ring did) and `ring_frame`. Then `message_record` and `messages`, `race`, and `links`.
"""
