"""Reading jaxprs: forward through what equations compute, and by what is nested in them."""
