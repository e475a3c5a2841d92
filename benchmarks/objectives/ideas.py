"""Objectives that an inner partition could have: no gradient from another partition, no learned state but its own.

`Idea` says what is combined; `Objective` is the loss made of it for one partition. Features (n, size) are its output: of a
convolution the channels, averaged over space; of tokens every position for itself, whose class is the next token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.device.device import keyed_seed


@dataclass(frozen=True, kw_only=True)
class Idea:
    """One way to judge a partition's output. The defaults are `prototype`: cross-entropy to fixed random directions."""

    kind: str = "directions"
    """directions (cross-entropy), regression (mean squared error), contrast (supervised contrastive), learned (a local head:
    breaks the rule, for comparison)."""
    normed: str = "layer"
    """What is made of the features first: layer, batch, unit (length), none (divided by sqrt(size) alone)."""
    drawn: str = "normal"
    """Of what kind the fixed targets are: normal, uniform (times kappa), orthogonal (a tight frame where classes are more than
    dimensions), simplex."""
    scale: float = 16.0
    """Of logits: at most so large. For a regression the kappa."""
    scale_per_depth: float = 1.0
    """The scale times this for every partition further up."""
    shared: bool = False
    """The same targets at every cut, where sizes agree."""
    smoothing: float = 0.0
    groups: int = 1
    """Features in so many groups, each judged for itself."""
    head: int = 0
    """A fixed random layer of head * size ReLUs before the directions."""
    keep: float = 0.0
    """Share of a random projection of the partition's input in a regression's target."""
    whole: bool = False
    """A convolution's features are all of C x H x W, and not averaged over space."""
    noise: float = 0.0
    """Standard deviations of noise on rows that a later partition reads, in theirs."""
    mixup: float = 0.0
    """Rows that a later partition reads are mixed in pairs, labels too, by Beta(mixup, mixup)."""
    first_too: bool = False
    """Noise and mixup for the network's own rows too."""
    robust: float = 0.0
    """(1 - p ** robust) / robust instead of -log p: rows that stay wrong weigh less (Zhang and Sabuncu 2018, eq. 6)."""
    first_scale: float = 0.0
    """Another scale for partition 0."""
    drop: float = 0.0
    """Share of the features that the loss does not see, drawn anew every time."""
    grid: int = 1
    """A convolution is averaged over so many by so many fields of its space, and not over all of it."""
    convolved: int = 0
    """A convolution goes through a fixed random one first, 3 x 3, stride 2, with so many times its channels, and ReLU."""
    overlap: int = 0
    """So many blocks of the next partition are trained along as a head, and trained on in their own."""
    several: int = 1
    """Directions for each class: a row is as near to it as to all of them together (logsumexp)."""
    beside: float = 0.0
    """Weight of the supervised contrastive loss beside the directions."""
    sample_scale: float = 0.0
    """Down-weights rows that are right already: (1 - p) ** sample_scale, as focal loss does."""


IDEAS = {
    "mse": Idea(kind="regression", normed="none", drawn="uniform", scale=10.0, whole=True),
    "mse of LayerNorm": Idea(kind="regression", scale=1.0),
    "mse keeping input": Idea(kind="regression", scale=1.0, keep=0.3),
    "prototype": Idea(),
    "same at every cut": Idea(shared=True),
    "cosine": Idea(normed="unit"),
    "whitened": Idea(normed="batch"),
    "orthogonal": Idea(drawn="orthogonal"),
    "simplex": Idea(drawn="simplex"),
    "falling scale": Idea(scale_per_depth=0.75),
    "smoothing": Idea(smoothing=0.1),
    "focal": Idea(sample_scale=1.0),
    "robust": Idea(robust=0.5),
    "groups": Idea(groups=4),
    "random head": Idea(head=4),
    "drop": Idea(drop=0.3),
    "noise": Idea(noise=0.3),
    "mixup": Idea(mixup=0.4, first_too=True),
    "grid": Idea(grid=2),
    "orthogonal grid": Idea(grid=2, drawn="orthogonal"),
    "random convolution": Idea(convolved=4),
    "overlap": Idea(overlap=1),
    "several": Idea(several=4),
    "contrast": Idea(kind="contrast"),
    "contrast beside": Idea(beside=0.5),
    "learned head": Idea(kind="learned"),
}


class Objective(nn.Module):
    """The loss of one partition. shape: of one row of its output; tokens: whether every position has a label."""

    def __init__(
        self, idea: Idea, shape: tuple[int, ...], classes: int, seed: int, partition: int, *, tokens: bool, inputs: int
    ) -> None:
        super().__init__()
        self.idea, self.tokens = idea, tokens
        self.pools = len(shape) == 3 and not idea.whole
        channels = shape[0] * max(1, idea.convolved)
        size = channels * idea.grid**2 if self.pools else shape[-1] if tokens else torch.Size(shape).numel()
        self.size, self.groups = size, idea.groups
        generator = torch.Generator().manual_seed(keyed_seed(seed, "sil", 0 if idea.shared else partition))
        self.convolution = None
        if self.pools and idea.convolved:
            self.convolution = torch.randn(channels, shape[0], 3, 3, generator=generator) * (2 / (9 * shape[0])) ** 0.5
        width = size // idea.groups
        self.head = None
        if idea.head:
            self.head = torch.randn(width, idea.head * width, generator=generator) * (2 / width) ** 0.5
            width *= idea.head
        self.width = width
        self.scale = idea.scale * idea.scale_per_depth**partition
        if idea.first_scale and not partition:
            self.scale = idea.first_scale
        drawn = [_drawn(idea.drawn, width, classes * idea.several, generator) for _ in range(idea.groups)]
        self.targets = torch.stack(drawn)  # (groups, width, classes)
        if idea.kind == "directions":
            self.targets = F.normalize(self.targets, dim=1) * self.scale
        self.learned = nn.Linear(size, classes) if idea.kind == "learned" else None
        if idea.keep:
            self.kept = torch.randn(inputs, size, generator=generator) / inputs**0.5

    def features(self, output: torch.Tensor) -> torch.Tensor:
        if self.convolution is not None:
            output = F.relu(F.conv2d(output, self.convolution, stride=2, padding=1))
        if self.pools:
            return F.adaptive_avg_pool2d(output, self.idea.grid).flatten(1)
        return output.flatten(0, 1) if self.tokens else output.flatten(1)

    def forward(self, output: torch.Tensor, labels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """labels: (rows,), or (rows, T), or of mixed rows probabilities (rows, classes)."""
        h, idea = self.features(output), self.idea
        labels = labels.flatten() if not labels.is_floating_point() else labels
        if idea.kind == "regression":
            return self._regress(h, labels, x)
        if idea.kind == "contrast":
            return _contrast(h, labels)
        if idea.beside:
            return self._judge(self.logits(h), labels) + idea.beside * _contrast(h, labels)
        return self._judge(self.logits(h), labels)

    def _judge(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits: (n, groups, classes)"""
        idea = self.idea
        if self.learned is None and idea.groups > 1:
            wanted = labels if labels.is_floating_point() else labels.repeat_interleave(idea.groups)
            return F.cross_entropy(logits.flatten(0, 1), wanted, label_smoothing=idea.smoothing)
        logits = logits.sum(1)
        if idea.robust and not labels.is_floating_point():
            right = F.softmax(logits, 1).gather(1, labels[:, None])
            return ((1 - right**idea.robust) / idea.robust).mean()
        if idea.sample_scale:
            with torch.no_grad():
                weight = (1 - F.softmax(logits, 1).gather(1, labels[:, None])[:, 0]) ** idea.sample_scale
            return (weight * F.cross_entropy(logits, labels, reduction="none")).mean()
        return F.cross_entropy(logits, labels, label_smoothing=idea.smoothing)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """(n, groups, classes)"""
        if self.learned is not None:
            return self.learned(F.layer_norm(h, (self.size,)))[:, None]
        h = h.unflatten(1, (self.groups, -1))
        if self.idea.drop:
            h = F.dropout(h, self.idea.drop, training=self.training)
        if self.head is not None:
            h = torch.relu(F.layer_norm(h, h.shape[2:]) @ self.head)
        if self.idea.normed == "layer":
            h = F.layer_norm(h, h.shape[2:]) / self.width**0.5
        elif self.idea.normed == "batch":
            h = (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt() / self.width**0.5
        elif self.idea.normed == "unit":
            h = F.normalize(h, dim=2)
        else:
            h = h / self.width**0.5
        logits = torch.einsum("ngw,gwc->ngc", h, self.targets)
        return logits.unflatten(2, (-1, self.idea.several)).logsumexp(3) if self.idea.several > 1 else logits

    def scores(self, output: torch.Tensor) -> torch.Tensor | None:
        h = self.features(output)
        if self.idea.kind == "contrast":
            return None
        if self.idea.kind == "regression":
            h = F.layer_norm(h, (self.size,)) if self.idea.normed == "layer" else h
            table = self.targets[0] * self.scale
            return 2 * h @ table - table.square().sum(0)
        return self.logits(h).sum(1)

    def _regress(self, h: torch.Tensor, labels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.idea.normed == "layer":
            h = F.layer_norm(h, (self.size,))
        table = self.targets[0].T * self.scale
        wanted = labels @ table if labels.is_floating_point() else table[labels]
        if self.idea.keep:
            x = (
                x.mean((2, 3))
                if x.ndim == 4 and len(self.kept) != x[0].numel()
                else x.flatten(0, 1)
                if self.tokens
                else x.flatten(1)
            )
            share = self.idea.keep
            wanted = (1 - share) ** 0.5 * wanted + share**0.5 * F.layer_norm(x.float() @ self.kept, (self.size,))
        return (h - wanted).square().mean()


def _drawn(kind: str, size: int, classes: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "uniform":
        return torch.rand(size, classes, generator=generator)
    drawn = torch.randn(size, classes, generator=generator)
    if kind == "normal":
        return drawn
    left, _, right = torch.linalg.svd(drawn.double(), full_matrices=False)
    drawn = (left @ right).float()  # the nearest with orthonormal columns, or of more classes than dimensions rows
    if kind == "simplex":
        drawn = drawn - drawn.mean(1, keepdim=True)
    return drawn


def _contrast(h: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
    """Supervised contrastive loss (Khosla et al. 2020, eq. 2) without augmented views."""
    h = F.normalize(h, dim=1)
    labels = labels.argmax(1) if labels.is_floating_point() else labels  # of mixed rows: what they are most of
    if len(h) > 512:  # positions of tokens: some of them
        chosen = torch.randperm(len(h))[:512]
        h, labels = h[chosen], labels[chosen]
    alike = (h @ h.T / temperature).fill_diagonal_(-1e9)
    same = (labels[:, None] == labels).fill_diagonal_(False)
    log = alike - alike.logsumexp(1, keepdim=True)
    count = same.sum(1)
    return -((log * same).sum(1)[count > 0] / count[count > 0]).mean()
