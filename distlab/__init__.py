"""distlab: learn distributed training by predicting, running and measuring it.

Importing the package loads neither torch nor matplotlib; the subpackages load what they need.
"""

__version__ = "0.1.0"
