"""The episode side: prompts, environments, grading, groups."""
