"""The code that runs on a device. It needs NumPy and an interpreter of .tflite files, and no TensorFlow."""
