"""`python -m seqpart` is the console script `seqpart`."""

from seqpart.train import console

console()
