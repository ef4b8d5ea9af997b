"""``--stage``: the opened files of the Python environment, brought close to each node."""
