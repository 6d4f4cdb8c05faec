"""The TFF engine: executes rounds through TensorFlow Federated, on one worker or on several."""
