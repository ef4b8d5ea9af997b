"""From a job script that exists to the settings of ``hpc-ddp.toml``; nothing of it is run."""
