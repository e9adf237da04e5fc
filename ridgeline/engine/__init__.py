"""The control plane: decides what runs, touches no tensors."""
