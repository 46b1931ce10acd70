"""What `distlab.blocks.models` has, at the place where learners import it."""

from distlab.blocks.models import (
    GPT as GPT,
    Attention as Attention,
    Block as Block,
    FeedForward as FeedForward,
    GPTConfig as GPTConfig,
)
