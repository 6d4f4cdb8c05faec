"""What runs on a device: an interpreter, NumPy and these files, without TensorFlow."""
