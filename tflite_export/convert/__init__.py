"""From a run to a bundle for a device. Needs TensorFlow."""
