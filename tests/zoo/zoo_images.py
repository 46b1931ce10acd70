"""Models of images and of sequences, small: written as people write them, not for this package."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, SIDE, WIDTH = 5, 8, 8


class ViT(nn.Module):
    """Patches, a class token and positions as bare parameters, blocks in a Sequential."""

    def __init__(self, depth=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(FusedBlock() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


class FusedAttention(nn.Module):
    """As timm's: query, key and value in one layer, heads told apart by attributes; norms of heads, a temperature."""

    def __init__(self, heads=4):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, WIDTH // heads, WIDTH
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.temperature * self.q_norm(query), self.k_norm(key), value)
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.attn_dim))


class FusedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = FusedAttention()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 12), "fc2": nn.Linear(12, WIDTH)})

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x))))


class Swin(nn.Module):
    """Windows that are rolled in every other block; a table of biases looked up by a buffer of whole numbers."""

    def __init__(self, depth=2, window=2):
        super().__init__()
        self.window = window
        self.embed = nn.Conv2d(3, WIDTH, 2, stride=2)
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1], persistent=False)
        self.tables = nn.ParameterList(torch.zeros((2 * window - 1) ** 2) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.embed(images).permute(0, 2, 3, 1)  # [B, 4, 4, C]
        side, w = x.shape[1], self.window
        for number, (table, qkv) in enumerate(zip(self.tables, self.qkv, strict=True)):
            shift = (number % 2) * w // 2
            y = x.roll((-shift, -shift), (1, 2)).unflatten(2, (-1, w)).unflatten(1, (-1, w))
            y = y.transpose(2, 3).flatten(3, 4).flatten(0, 2)  # [windows, w * w, C]
            query, key, value = qkv(y).chunk(3, -1)
            y = (query @ key.transpose(1, 2) / WIDTH**0.5 + table[self.index]).softmax(-1) @ value
            y = y.unflatten(0, (len(x), side // w, side // w)).unflatten(3, (w, w)).transpose(2, 3).flatten(3, 4)
            x = x + y.flatten(1, 2).roll((shift, shift), (1, 2))
        return self.head(x.mean((1, 2)))


class ResNet(nn.Module):
    """Residual blocks with BatchNorm; one changes the size, and its way around does, too."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.layer1 = nn.Sequential(Residual(6, 6), Residual(6, 6))
        self.layer2 = nn.Sequential(Residual(6, 10, stride=2))
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, images):
        x = self.layer2(self.layer1(self.bn1(self.conv1(images)).relu()))
        return self.fc(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.around = None
        if stride > 1:
            self.around = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        around = x if self.around is None else self.around(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + around)


class Recurrent(nn.Module):
    """An LSTM of two layers in both directions; the last output decides."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, images):
        output, _ = self.rnn(images.flatten(2).transpose(1, 2)[:, ::8])
        return self.fc(output[:, -1])
