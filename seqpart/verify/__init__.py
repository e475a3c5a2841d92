"""Training under the limit against full training, bit by bit."""

from seqpart.verify.verification import verify

__all__ = ["verify"]
