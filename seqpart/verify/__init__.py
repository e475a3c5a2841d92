"""Training under the limit against full training, bit by bit."""

from seqpart.verify.verification import verified, verify

__all__ = ["verified", "verify"]
