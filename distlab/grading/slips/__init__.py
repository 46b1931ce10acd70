"""Generated slips: a reference with one place of its text changed, by name, text and words.

Read `usual` (the changes of one node that mutation testing knows) and `other` (what people mistake for one another)
first. `generate` goes through a reference's syntax tree and yields the slips. It goes through an answer's tree as well:
there `missing` adds what an answer may lack, and a change that makes it right tells where it is wrong.
"""
