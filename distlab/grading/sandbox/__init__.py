"""What an answer may take while it is checked, and what it must leave as it was: enforced inside each rank.

Read `limits` first: memory, files and processes. `guard` calls the answer under them, takes plain results only, and
refuses where the answer changed the group, torch's functions or a default of the whole process. This stops accidents,
not attackers: an answer runs as your user and can read what you can.
"""
