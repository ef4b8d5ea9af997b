"""The start of a node's workers: by fork from a process that has imported torch, or by exec."""
