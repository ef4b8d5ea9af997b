"""The order of the training data, and its loaders."""
