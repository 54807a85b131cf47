"""Type each primitive's results: the funnel, and the laws that it applies."""
