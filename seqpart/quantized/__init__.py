"""Layers of quantized weights, which do not learn and travel as they are packed."""
