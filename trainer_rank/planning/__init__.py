"""Plan a batch without a GPU: what would run, what it would take, and what no tape covers."""
