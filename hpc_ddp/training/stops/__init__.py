"""When to save and when to stop, agreed on by all ranks."""
