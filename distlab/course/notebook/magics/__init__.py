"""`%%ranks`: a cell that runs on ranks, which stay alive between cells.

Read `magic`; `remote` is what runs inside a rank, and `trouble` says what went wrong there.
"""
