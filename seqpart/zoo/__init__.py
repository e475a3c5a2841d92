"""Ready-made models and data sets. Only the command, the examples and the tests import them."""
