"""Files of ours: direct I/O, replaced whole, checksummed, kept while a checkpoint names them."""
