"""Data sets and data loaders whose rows are read anew in every epoch, and the processes that read them."""
