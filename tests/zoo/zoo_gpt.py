"""GPTs, small: as nanoGPT writes them, and as Hugging Face does."""

import torch
import torch.nn.functional as F
from torch import nn
from zoo_text import HEADS, LENGTH, VOCAB, WIDTH, attend


class TiedGPT(nn.Module):
    """As nanoGPT: tied embeddings, a norm without bias, (logits, loss) returned."""

    def __init__(self, depth=3, attention=None, linear=nn.Linear):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(GPTBlock(attention or CausalAttention, linear) for _ in range(depth)),
                "ln_f": nn.LayerNorm(WIDTH, bias=False),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CausalAttention(nn.Module):
    """As nanoGPT's: it takes the width of a head from the shape of its input."""

    def __init__(self, linear):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        queries, keys, values = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for part in parts
        )
        y = attend(queries, keys, values, causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class SplitAttention(nn.Module):
    """As Hugging Face's GPT-2: it keeps the width of all heads and that of one."""

    def __init__(self, linear):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim, self.split_size = WIDTH, HEADS, WIDTH // HEADS, WIDTH
        self.c_attn, self.c_proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        parts = self.c_attn(hidden_states).split(self.split_size, dim=2)
        parts = (part.view(*part.shape[:-1], -1, self.head_dim).transpose(1, 2) for part in parts)
        y = attend(*parts, causal=True).transpose(1, 2)
        return self.c_proj(y.reshape(*y.shape[:-2], -1))


class Conv1D(nn.Module):
    """As Hugging Face's: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.nx, self.nf = inputs, outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x):
        return x @ self.weight + self.bias


class FeedForward(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.c_fc, self.c_proj = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class GPTBlock(nn.Module):
    def __init__(self, attention, linear):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attn, self.mlp = attention(linear), FeedForward(linear)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def conv1d_gpt(depth=3):
    return TiedGPT(depth, attention=SplitAttention, linear=Conv1D)
