"""The learner side: training programs, optimizer state, trainer."""
