"""Tools for developers, which take hours and can be resumed; see docs/testing.md."""
