"""What the website adds to Sphinx, in the order of a build.

`players` lets widgets play in pages: some compute there, from what `computed` gives their scripts; of others `states`
works out each state, and `slices` finds the lines of a lesson that make them.
`reference` writes the pages of the packages, `faults` those of all faults that the checks name. `docstrings` turns
the project's docstrings into reStructuredText, `notebooks` prepares lessons to be pages,
`mathml` writes formulas without a script.
"""
