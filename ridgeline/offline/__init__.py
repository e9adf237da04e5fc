"""Parts of the offline API: jobs made of prompts, jobs under way on the engine, and the rounds of beam search."""
