"""Train PyTorch models larger than memory."""
