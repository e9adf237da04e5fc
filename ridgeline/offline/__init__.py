"""Parts of the offline API: jobs from prompts, jobs under way on the engine, and the rounds of beam search."""
