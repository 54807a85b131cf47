"""Read jaxprs: follow values forward through equations, or walk through nested jaxprs."""
