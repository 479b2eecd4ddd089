"""The models of workloads.cpp, for Python's peers of the benchmark."""

import torch
from torch import nn


def layers(count, width):
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())))


def convolution(source, target, size, stride):
    return nn.Conv2d(source, target, size, stride=stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, source, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            convolution(source, width, 1, 1), nn.BatchNorm2d(width), nn.ReLU(),
            convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
            convolution(width, 4 * width, 1, 1), nn.BatchNorm2d(4 * width))
        self.shortcut = None
        if stride != 1 or source != 4 * width:
            self.shortcut = nn.Sequential(convolution(source, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        return torch.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        body = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU()]
        source = 64
        for width, blocks in (64, 3), (128, 4), (256, 6), (512, 3):
            for block in range(blocks):
                body.append(Bottleneck(source, width, 2 if block == 0 and width > 64 else 1))
                source = 4 * width
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(2048, 1000)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            convolution(1, 16, 3, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            convolution(16, 32, 3, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100000, 64, sparse=True)
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


def transformer():
    layer = nn.TransformerEncoderLayer(512, 8, dim_feedforward=2048, dropout=0.0)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def make_workload(name):
    """The model, its input and its target."""
    if name == "mlp":
        return layers(12, 1024), torch.randn(32, 1024), torch.randn(32, 1024)
    if name == "deep":
        return layers(400, 32), torch.randn(8, 32), torch.randn(8, 32)
    if name == "resnet50":
        return ResNet50(), torch.randn(4, 3, 32, 32), torch.randn(4, 1000)
    if name == "transformer":
        return transformer(), torch.randn(32, 2, 512), torch.randn(32, 2, 512)
    if name == "digits":
        return Digits(), torch.randn(64, 1, 28, 28), torch.randn(64, 10)
    if name == "embedding":
        return Words(), torch.randint(100000, (64, 16)), torch.randn(64, 64)
    raise ValueError(f"no workload {name}")
