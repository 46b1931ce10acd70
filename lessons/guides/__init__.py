"""What GUIDES.ipynb runs: `trial` tries the snippets of `copies` (every rank has the whole model) and of `parts`."""

from guides.copies import *  # noqa: F403 (what the page's snippets use)
from guides.parts import *  # noqa: F403
from guides.trial import *  # noqa: F403
