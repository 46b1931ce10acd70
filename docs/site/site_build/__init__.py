"""What the website adds to Sphinx, in the order of a build.

`players` works out the states of each widget that plays in a page, `slices` finds the lines of a lesson that make it.
`reference` writes the pages of the packages, `faults` those of all faults that the checks name. `docstrings` turns
the project's docstrings into reStructuredText, `notebooks` prepares lessons to be pages,
`mathml` writes formulas without a script.
"""
