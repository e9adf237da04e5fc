"""Several processes that act as one worker: a leader in the engine's process, and one process for each rank."""
