"""What an answer may do while it is checked: enforced inside each rank, and told in a sentence.

Read `guard` (limits of memory, files and processes around one call), `tamper` (torch's functions and the check itself
stay as they are), `wires` (ways to other ranks that no record shows) and `library` (functions that would do the work
for the answer).
"""
