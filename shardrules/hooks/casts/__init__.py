"""Place casts: the linear program as a graph, its cheapest cut, and the writer of the new jaxpr."""
