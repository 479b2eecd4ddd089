"""The models of the matrix; models.cpp has the same ones, from the same operations.

A model's forward takes a batch and whether this rank uses the layer `spare` now. That layer exists
only where the mode asks for it, and is registered second: neither end of the list is its place.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def add_spare(self, with_spare, width, dtype=None):
        self.spare = nn.Linear(width, width, dtype=dtype) if with_spare else None

    def maybe_spare(self, hidden, use_spare):
        return hidden + self.spare(hidden) if use_spare else hidden


class Mlp(Model):
    def __init__(self, with_spare):
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.add_spare(with_spare, 32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x, use_spare):
        x = self.maybe_spare(torch.relu(self.first(x)), use_spare)
        x = torch.relu(self.second(x))
        x = torch.relu(self.third(x))
        return self.last(x)

    @staticmethod
    def batch(generator):
        return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)

    loss = staticmethod(functional.mse_loss)


class Convolutional(Model):
    # No bias before a batch norm: its gradient is rounding noise, and it may never move.
    def __init__(self, with_spare):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, bias=False)
        self.add_spare(with_spare, 6)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.last = nn.Linear(64, 5)

    def forward(self, x, use_spare):
        x = self.maybe_spare(self.conv1(x), use_spare)
        x = torch.relu(self.norm1(x))
        x = torch.relu(self.norm2(self.conv2(x)))
        x = functional.max_pool2d(x, 2)
        return self.last(torch.flatten(x, 1))

    @staticmethod
    def batch(generator):
        return (torch.randn(8, 1, 8, 8, generator=generator),
                torch.randint(0, 5, (8,), generator=generator))

    loss = staticmethod(functional.cross_entropy)


class Lstm(Model):
    def __init__(self, with_spare):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.add_spare(with_spare, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x, use_spare):
        x = self.lstm(x)[0].select(1, -1)
        return self.last(self.maybe_spare(x, use_spare))

    @staticmethod
    def batch(generator):
        return torch.randn(6, 5, 8, generator=generator), torch.randn(6, 3, generator=generator)

    loss = staticmethod(functional.mse_loss)


class EncoderLayer(nn.Module):
    """Attention written out: nn.MultiheadAttention runs a fused kernel that its C++ twin does not."""

    HEADS = 2

    def __init__(self, width, inner):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)

    def forward(self, x):
        batch, length, width = x.shape
        each = width // self.HEADS
        parts = self.query_key_value(self.norm1(x)).view(batch, length, 3, self.HEADS, each)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(each))
        mixed = torch.matmul(torch.softmax(scores, -1), value)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.outer(functional.gelu(self.inner(self.norm2(x))))


class Transformer(Model):
    def __init__(self, with_spare):
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, 16) * 0.1)
        self.embedding = nn.Embedding(20, 16)
        self.add_spare(with_spare, 16)
        self.layers = nn.ModuleList([EncoderLayer(16, 32), EncoderLayer(16, 32)])
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 20)

    def forward(self, x, use_spare):
        x = self.maybe_spare(self.embedding(x) + self.position, use_spare)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.norm(x)).flatten(0, 1)

    @staticmethod
    def batch(generator):
        return (torch.randint(0, 20, (4, 6), generator=generator),
                torch.randint(0, 20, (24,), generator=generator))

    loss = staticmethod(functional.cross_entropy)


class Tied(Model):
    """A small language model whose output layer shares the embedding's weight."""

    def __init__(self, with_spare):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.add_spare(with_spare, 16)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.output = nn.Linear(16, 20)
        self.output.weight = self.embedding.weight

    def forward(self, x, use_spare):
        x = self.recurrent(self.embedding(x))[0]
        return self.output(self.maybe_spare(x, use_spare)).flatten(0, 1)

    @staticmethod
    def batch(generator):
        words = torch.randint(0, 20, (4, 7), generator=generator)
        return words[:, :-1], words[:, 1:].flatten()

    loss = staticmethod(functional.cross_entropy)


class Sparse(Model):
    """Its embedding's gradient is sparse: rows that other ranks do not have, and some twice."""

    def __init__(self, with_spare):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.add_spare(with_spare, 16)
        self.embedding = nn.Embedding(12, 16, sparse=True)
        self.last = nn.Linear(16, 12)

    def forward(self, x, use_spare):
        words = self.embedding(x)
        x = self.maybe_spare(torch.relu(self.first(functional.one_hot(x, 12).to(words.dtype))), use_spare)
        return self.last(torch.relu(x + words)).flatten(0, 1)

    @staticmethod
    def batch(generator):
        return (torch.randint(0, 12, (2, 4), generator=generator),
                torch.randint(0, 12, (8,), generator=generator))

    loss = staticmethod(functional.cross_entropy)


class MixedDtypes(Model):
    def __init__(self, with_spare):
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.add_spare(with_spare, 32)
        self.narrow = nn.Linear(32, 32, dtype=torch.float16)
        self.wide = nn.Linear(32, 32, dtype=torch.float64)
        self.brain = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.last = nn.Linear(32, 4)

    def forward(self, x, use_spare):
        x = self.maybe_spare(torch.tanh(self.first(x)), use_spare)
        x = torch.tanh(self.narrow(x.to(torch.float16)))
        x = torch.tanh(self.wide(x.to(torch.float64)))
        x = torch.tanh(self.brain(x.to(torch.bfloat16)))
        return self.last(x.to(torch.float32))

    @staticmethod
    def batch(generator):
        return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)

    loss = staticmethod(functional.mse_loss)


class Complex(Model):
    def __init__(self, with_spare):
        super().__init__()
        self.first = nn.Linear(6, 16, dtype=torch.complex64)
        self.add_spare(with_spare, 16, torch.complex64)
        self.second = nn.Linear(16, 16, dtype=torch.complex64)
        self.last = nn.Linear(16, 3, dtype=torch.complex64)

    def forward(self, x, use_spare):
        x = self.first(x)
        x = self.maybe_spare(x / (1 + x.abs()), use_spare)
        x = self.second(x)
        return self.last(x / (1 + x.abs()))

    @staticmethod
    def batch(generator):
        return (torch.randn(8, 6, generator=generator, dtype=torch.complex64),
                torch.randn(8, 3, generator=generator, dtype=torch.complex64))

    @staticmethod
    def loss(output, target):
        return (output - target).abs().square().mean()


MODELS = {
    "mlp": Mlp,
    "convolutional": Convolutional,
    "lstm": Lstm,
    "transformer": Transformer,
    "tied": Tied,
    "sparse": Sparse,
    "mixed_dtypes": MixedDtypes,
    "complex": Complex,
}
