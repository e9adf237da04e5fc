"""Models that run through the modules of the installed transformers package, with our attention, cache, scheduler and
sampler. It is an extra: nothing else in the engine imports transformers."""
