"""The command line: options, one call, print. Nothing here computes."""
