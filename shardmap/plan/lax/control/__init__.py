"""The rules of equations that hold jaxprs: loops and branches."""
