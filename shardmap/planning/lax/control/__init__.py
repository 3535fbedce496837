"""Rules of the primitives that hold jaxprs: loops and branches."""
