"""What the offline API is made of: jobs from prompts, jobs under way on the engine, and the rounds of beam search."""
