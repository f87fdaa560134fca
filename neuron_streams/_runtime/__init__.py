"""The asynchronous NEFF runtime: one port, several implementations. Private."""
