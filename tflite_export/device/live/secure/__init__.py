"""Secure aggregation on a device: fixed-point numbers, masks, shares, and the four messages. See docs/secure.md."""
