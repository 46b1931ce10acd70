"""What GUIDES.ipynb runs: the snippets that guides print, and `trial`, which puts them on trial."""

from guides import training as training
from guides.trial import (
    TRIALS as TRIALS,
    ask as ask,
    cells as cells,
    close as close,
    table as table,
    verdict as verdict,
)
