"""Ready-made models and data sets. Only the door, the examples and the tests import them."""
