"""Rollouts: prompts, episodes, grading, groups, evaluation."""
