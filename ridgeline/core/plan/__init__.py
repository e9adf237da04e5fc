"""The contract between control plane and data plane: requests, plans, results, and what a worker can do."""
