"""Cards that need not be here, each described by a table whose every number names its source."""
