"""Commands for runs, on the login node: status, explain, logs, report, clean, bundle."""
