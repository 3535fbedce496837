"""The rules of equations that hold jaxprs: loops, branches, calls, maps."""
