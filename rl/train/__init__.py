"""The learner: training programs, optimizers, scoring, diagnosis."""
