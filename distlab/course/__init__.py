"""What makes it a course: checks that name the fault, labs, notebooks, a class, the last task.

Start at `grading` (a learner's function on real ranks). `lab` is the frame of all labs, `notebook` what runs in a
browser, `classroom` for instructors, `capstone` the last task; `flags` reads what labs and commands are told, `page`
writes HTML. Importing the package loads nothing.
"""
