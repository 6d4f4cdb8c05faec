"""A device in live rounds: it talks to a server over HTTP. Needs NumPy, LiteRT and cryptography, and no TensorFlow."""
