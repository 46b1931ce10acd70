"""What an answer may do while it is checked: enforced inside each rank, and told in a sentence.

Read `guard` first: limits of memory, files and processes around one call. `tamper` sees to it that torch's functions
and the check itself stay as they are. `wires` knows ways to other ranks that no record shows. `library` knows functions
that would do the work for the answer, and finds them by `loaded`.
"""
