"""What is read afterwards, or meanwhile, on the login node."""
