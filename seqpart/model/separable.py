"""Layers whose outputs fall into groups that depend on weights of their own: the separable layer of P. Raynaud, D. Orban and
J. Bigeon, "Partially-separable loss to parallelize partitioned neural network training" (2023), section 5.2."""

import math

import torch
from torch import nn

from seqpart.errors import ModelError


class SeparableLinear(nn.Module):
    """A linear layer in `groups`: output group g is a linear function of input group g alone, with 1/groups of the weights.

    Maps (..., in_features) to (..., out_features). Groups lie one after the other, as channels do in a grouped convolution and
    in the flattened output of a convolution with groups * a kernels. weight (out_features, in_features / groups), bias
    (out_features,), initialized as those of nn.Linear(in_features / groups, out_features / groups) are. Raises ModelError
    where groups do not divide both.
    """

    def __init__(self, in_features: int, out_features: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        if groups < 1 or in_features % groups or out_features % groups:
            raise ModelError(
                f"SeparableLinear: expected a number of groups that divides {in_features} inputs and {out_features} outputs; "
                f"found {groups}."
            )
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(out_features, in_features // groups))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(max(1, self.in_features // self.groups))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, groups = x.shape[:-1], self.groups
        rows = x.reshape(-1, groups, self.in_features // groups).transpose(0, 1)  # (groups, rows, inputs of one)
        weight = self.weight.view(groups, -1, self.in_features // groups).transpose(1, 2)
        bias = self.bias
        found = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.view(groups, 1, -1), rows, weight)
        return found.transpose(0, 1).reshape(*shape, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, groups={self.groups}"
