"""A matrix of variation: call an answer with drawn arguments, call the reference with the same, compare everything.

Read `draw` (seeded arguments, and `Vary`, which an exercise declares) and `calls` (what makes the calls on every rank)
first. `verdict` names the fault: a known wrong version that agrees gives its
words (`distlab.course.grading.agreement`), else the answer's own text is searched (`distlab.course.grading.causes`).
"""
