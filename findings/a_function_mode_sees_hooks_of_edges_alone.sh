#!/usr/bin/env bash
# torch 2.14.1: a TorchFunctionMode around a backward pass sees what Python code in it calls (hooks, backward of an
# autograd.Function) only if the pass starts from gradient edges. loss.backward() and torch.autograd.backward([loss]) are torch
# functions themselves: the mode sees these calls, is turned off inside its own handler, and with it for all that they run. From
# torch.autograd.graph.get_gradient_edge(loss), the same pass to the same gradients, it sees each call in a hook. A
# TorchDispatchMode sees them both ways. So a mode that guards or counts calls is blind in the usual backward pass. Fails if
# torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

print("torch", torch.__version__)
weight = torch.nn.Parameter(torch.ones(3))
weight.register_hook(lambda gradient: gradient.cosh())


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        seen.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def of_tensor(loss):
    torch.autograd.backward([loss], [torch.ones(())])


def of_edge(loss):
    torch.autograd.backward([get_gradient_edge(loss)], [torch.ones(())])


found, gradients = {}, []
for mode in Functions, Operations:
    for start in of_tensor, of_edge:
        seen, weight.grad = [], None
        loss = (weight * 2).sum()
        with mode():
            start(loss)
        gradients.append(weight.grad)
        found[mode.__name__, start.__name__] = "cosh" in seen
print("the mode sees cosh, which the hook calls:", found)
assert all(torch.equal(one, gradients[0]) for one in gradients)
assert list(found.values()) == [False, True, True, True]
PY
