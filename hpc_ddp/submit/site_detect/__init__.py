"""`hpc-ddp site detect`: probe a cluster, infer its settings."""
