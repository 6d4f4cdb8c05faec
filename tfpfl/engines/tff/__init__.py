"""The TFF engine."""
