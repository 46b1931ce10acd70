"""Generated slips: a reference with one place of its text changed, by name, text and words.

Read `usual` (the changes of one node that mutation testing knows) and `other` (what people mistake for one another)
first. `generate` goes through a reference's syntax tree and yields the slips.
"""
