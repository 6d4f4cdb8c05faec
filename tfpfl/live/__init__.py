"""Live rounds: a server that devices join over HTTP, and a run whose result is the simulated one. See docs/live.md."""
