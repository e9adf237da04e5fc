"""A fleet of replicas on a virtual clock. Scheduler, cache and policies are the engine's own; a device is its cost."""
