"""The local engine: executes rounds in this process, without TensorFlow Federated."""
