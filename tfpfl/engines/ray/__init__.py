"""The Ray engine: executes rounds on a Ray cluster, or on the cores of this machine."""
